"""torch.compile of the whole model."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from perftrain.facts import Bottleneck, Card, Gain, Numerics, PerftrainError, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import Plan

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True)
class Compile(Switch):
    """Trace the model and generate fused kernels (``torch.compile``), in place.

    Pays where many small or element-wise kernels run one after the other. The first step takes 10–300 s; it must be earned
    back (the verdict says after how many steps). Not for runs of a few hundred steps, nor for inputs whose shapes change all
    the time (see ``dynamic``). ``mode``: default, reduce-overhead, max-autotune, max-autotune-no-cudagraphs.
    """

    mode: str = "default"
    dynamic: bool | None = None
    """True: one kernel for all shapes; False: one for each; None: torch decides."""
    fullgraph: bool = False
    """Refuse graph breaks instead of working around them."""

    card: ClassVar[Card] = Card(
        name="compile",
        summary="fused kernels through torch.compile",
        place=Place.COMPILE,
        numerics=Numerics.CLOSE,
        relieves=(Bottleneck.LAUNCH_OVERHEAD, Bottleneck.COMPUTE_MEMORY_BOUND, Bottleneck.HOST_PYTHON),
        requires=("a C++ compiler (CPU) or Triton (CUDA)",),
        cost="10–300 s of compiling in the first step",
    )

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise PerftrainError(f"compile.mode is one of {', '.join(MODES)}; it was {self.mode!r}. Try opt.compile.mode=default.")

    def unavailable(self, plan: Plan) -> str:
        if plan.device.type == "cpu" and sys.platform != "win32" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
            return "torch.compile needs a C++ compiler for the CPU and none is on PATH; install g++ (apt-get install g++)."
        return ""

    def predict(self, now: StepBreakdown) -> Gain:
        share = now.share("forward", "backward")
        return Gain.from_share(share, 1.0, 1.5, f"forward and backward are {share:.0%} of the step; fusing removes part of them")

    def model(self, model: nn.Module, plan: Plan) -> nn.Module:
        model.compile(mode=self.mode, dynamic=self.dynamic, fullgraph=self.fullgraph)
        return model
