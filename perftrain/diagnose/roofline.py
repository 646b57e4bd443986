"""How near forward and backward come to what this machine can do: FLOP and bytes of a step against measured peaks.

Source: Williams, Waterman, Patterson, "Roofline" (2009); MFU as in Chowdhery et al., "PaLM" (2022), appendix B.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from perftrain.diagnose.seen import Seen
from perftrain.facts import PerftrainError
from perftrain.measure.flops import model_flop_utilization

PEAK_OF = {"float": ("float32", "tf32"), "c10::BFloat16": ("bfloat16",), "c10::Half": ("float16",)}
"""Type of an operation's inputs -> the peaks it may come up to, the likelier first."""
NAMES = {"float": "float32", "c10::BFloat16": "bfloat16", "c10::Half": "float16", "double": "float64"}


def roofline(seen: Seen) -> dict[str, Any]:
    """FLOP (products, convolutions, attention) and bytes (at least) of one step's forward and backward, their ``seconds``, the type
    that most of the FLOP are in, and ``mfu``, the part (0..1) of that type's peak they reach; empty without FLOP or peaks."""
    by_type: dict[str, float] = defaultdict(float)
    for operation in seen.computing:
        by_type[operation.dtype] += operation.flop
    steps = max(1, seen.trace.get("steps") or 1)
    seconds = seen.share("forward", "backward") * seen.step_s
    flop = sum(by_type.values()) / steps
    peaks = seen.peaks.get("matmul") or {}
    if not flop or not seconds or not peaks:
        return {}
    kind = max(by_type, key=lambda k: by_type[k])
    return {
        "dtype": NAMES.get(kind, kind), "flop": flop, "bytes": sum(o.bytes for o in seen.computing) / steps, "seconds": seconds,
        "mfu": _utilization(flop, seconds, [peaks[name] for name in PEAK_OF.get(kind, ()) if name in peaks]),
        "peaks": {"flop": dict(peaks), "memory": (seen.peaks.get("copy") or {}).get("memory")},
    }  # fmt: skip


def _utilization(flop: float, seconds: float, candidates: list[Mapping[str, float]]) -> float | None:
    """Against the first peak that is not below it; None where even the highest is, which is a measuring error."""
    for peak in candidates:
        with suppress(PerftrainError):
            return model_flop_utilization(flop, seconds, peak)
    return None


def roofline_line(seen: Seen) -> str:
    """The same as evidence in a sentence, or an empty string."""
    found = roofline(seen)
    if not found or found["mfu"] is None:
        return ""
    peak = found["flop"] / found["seconds"] / found["mfu"]
    return (
        f"forward and backward do {found['flop'] / found['seconds'] / 1e9:,.0f} GFLOP/s: {found['mfu']:.0%} of what "
        f"this machine's products "
        f"reach in {found['dtype']} ({peak / 1e9:,.0f}, measured)"
    )
