"""How many floating-point operations a step needs, counted once: the useful ones, as the plain program asks for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from perftrain.facts import PerftrainError


def count_flop(step: Callable[[], object]) -> int:
    """FLOP of matrix products, convolutions and attention (a multiply-add is two) in one call of ``step``, backward included.

    Element-wise work is not counted, as is usual for MFU. Count on the program without switches: what recomputation
    (checkpointing) adds is no useful work.
    Source: ``torch.utils.flop_counter``; Chowdhery et al., "PaLM" (2022), appendix B for MFU.
    """
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())


def model_flop_utilization(flop: float, step_s: float, peak: Mapping[str, Any]) -> float:
    """MFU: the part (0..1) of the peak (``{"amount": FLOP, "seconds": s}``) that a step of ``step_s`` seconds reaches.

    Raises:
        PerftrainError: above 1, which is a measuring error.
    """
    found = flop / step_s / (peak["amount"] / peak["seconds"])
    if found > 1:
        raise PerftrainError(
            f"A step cannot compute faster than the machine: {flop:.3g} FLOP in {step_s:.3g} s is {found:.0%} of the measured peak. "
            "Measure the peak again, in the dtype that the step uses."
        )
    return found
