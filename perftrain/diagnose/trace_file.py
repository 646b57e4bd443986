"""A trace that torch.profiler exported (``export_chrome_trace``), read into what the rules ask for; no torch needed.

Phases come from the annotations that torch itself puts into a trace (``ProfilerStep#``, ``enumerate(DataLoader)``,
``Optimizer.step``, ``autograd::engine``); what is left of the training thread's operations is the forward pass.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perftrain.diagnose.device import Call, Host, Work, device_trace, process_of
from perftrain.diagnose.intervals import Intervals, intersect, total, union, without
from perftrain.diagnose.seen import Seen
from perftrain.facts import PerftrainError

TINY_S = 20e-6
DATA, OPTIMIZER, BACKWARD = ("enumerate(DataLoader)", "DataLoader"), ("Optimizer.step", "Optimizer.zero_grad"), ("autograd::engine",)
WAITING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "hipStreamSynchronize", "hipDeviceSynchronize")
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
Span = tuple[float, float, str, Mapping[str, Any]]
"""Start and end in seconds, name, the event itself."""


def read_trace(path: Path) -> Seen:
    """The trace as if the program had been watched.

    Raises:
        PerftrainError: no such file, or it is no trace of torch.profiler.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        raw = json.loads(content)
        events = raw["traceEvents"] if isinstance(raw, dict) else raw
        spans = [_span(e) for e in events if e.get("ph") == "X" and "dur" in e]
    except FileNotFoundError:
        raise PerftrainError(f"There is no trace {str(path)!r}. Type the file that prof.export_chrome_trace wrote.") from None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise PerftrainError(
            f"{path} is no trace of torch.profiler ({type(error).__name__}: {error}). Use prof.export_chrome_trace."
        ) from None
    host = [s for s in spans if s[3].get("cat") in ("cpu_op", "user_annotation", "cuda_runtime")]
    if not any(s[3].get("cat") == "cpu_op" for s in host):
        raise PerftrainError(f"{path} holds no operations of the host. Record it with ProfilerActivity.CPU.")
    return Seen(_process(host, [s for s in spans if s[3].get("cat") in DEVICE_CATEGORIES]))


def _span(event: Mapping[str, Any]) -> Span:
    start = float(event["ts"]) / 1e6
    return start, start + float(event["dur"]) / 1e6, str(event.get("name", "")), event


def _process(host: list[Span], device: list[Span]) -> dict[str, Any]:
    steps = sorted(s for s in host if s[2].startswith("ProfilerStep"))
    by_thread: dict[Any, list[Span]] = defaultdict(list)
    for span in host:
        by_thread[span[3].get("tid")].append(span)
    main = max(by_thread.values(), key=lambda t: (any(s[2].startswith("ProfilerStep") for s in t), len(t)))
    borders = [(s[0], s[1]) for s in steps] or [(min(s[0] for s in main), max(s[1] for s in main))]
    backward = union(s[:2] for s in host if s[2].startswith(BACKWARD))
    phases = {
        "data_wait": union(s[:2] for s in main if s[2].startswith(DATA)),
        "optimizer": union(s[:2] for s in main if s[2].startswith(OPTIMIZER)),
        "backward": backward,
        "sync": union(s[:2] for s in main if s[2] in WAITING),
    }
    phases["forward"] = without(union(s[:2] for s in main if s[3].get("cat") == "cpu_op"), union(i for p in phases.values() for i in p))
    seen = {
        "operations": _operations(by_thread, phases), "wall_s": total(borders),
        "phase_s": {n: total(intersect(p, borders)) for n, p in phases.items()},
        **(_device_side(host, device, phases["data_wait"], borders) if device else {}),
    }  # fmt: skip
    return process_of("cuda" if device else "cpu", borders, phases, seen)


def _device_side(host: list[Span], device: list[Span], data_wait: Intervals, borders: Intervals) -> dict[str, Any]:
    """Copies are told by their names: "Memcpy HtoD (Pageable -> Device)"."""
    kinds = {"gpu_memcpy": "copy", "gpu_memset": "fill"}
    work = [
        Work(begin, end, name, kinds.get(event["cat"], "kernel"), int((event.get("args") or {}).get("bytes") or 0), "HtoD" in name,
             "Pageable" in name, event.get("tid") or 0)
        for begin, end, name, event in device
    ]  # fmt: skip
    waits = [Call(begin, end, name) for begin, end, name, _ in host if name in WAITING]
    return device_trace(work, Host(waits, data_wait), borders)


def _operations(by_thread: Mapping[Any, list[Span]], phases: Mapping[str, Sequence[tuple[float, float]]]) -> list[list[Any]]:
    """Own time by operation and phase: each span's time without that of the spans inside it."""
    sums: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0, 0, 0.0])
    for thread in by_thread.values():
        open_spans: list[list[Any]] = []
        for start, end, name, event in sorted((s for s in thread if s[3].get("cat") == "cpu_op"), key=lambda s: (s[0], -s[1])):
            while open_spans and start >= open_spans[-1][0]:
                _close(open_spans.pop(), sums)
            if open_spans:
                open_spans[-1][1] -= end - start
            dtype = str(((event.get("args") or {}).get("Input type") or [""])[0])
            phase = next((p for p, parts in phases.items() if any(a <= start < b for a, b in parts)), "rest")
            open_spans.append([end, end - start, (name, dtype, phase)])
        while open_spans:
            _close(open_spans.pop(), sums)
    return [[name, dtype, *values, phase] for (name, dtype, phase), values in sorted(sums.items(), key=lambda i: -i[1][1])][:200]


def _close(span: list[Any], sums: dict[tuple[str, str, str], list[float]]) -> None:
    row, own = sums[span[2]], max(0.0, span[1])
    row[0] += 1
    row[1] += own
    if own < TINY_S:
        row[3] += 1
        row[4] += own
