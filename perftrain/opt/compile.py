"""torch.compile of the model, whole or by repeated blocks."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from perftrain.facts import Bottleneck, Card, Gain, Numerics, PerftrainError, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import Plan, repeated_blocks

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
SCOPES = ("model", "blocks")


@dataclass(frozen=True)
class Compile(Switch):
    """Trace the model and generate fused kernels (``torch.compile``), in place.

    Pays where many small or element-wise kernels run one after the other. The first step takes 10–300 s; it must be earned
    back (the verdict says after how many steps, and how often the trace broke off or had to be made again, and why). Not for
    runs of a few hundred steps, nor for inputs whose shapes change all the time (see ``dynamic``). ``mode``: default,
    reduce-overhead, max-autotune, max-autotune-no-cudagraphs. ``scope``: ``blocks`` compiles only the blocks that the model
    repeats, once for all of them: a shorter first step in deep models, less fused across their borders.
    """

    mode: str = "default"
    dynamic: bool | None = None
    """True: one kernel for all shapes; False: one for each; None: torch decides."""
    fullgraph: bool = False
    """Refuse graph breaks instead of working around them."""
    scope: str = "model"

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
        if self.scope not in SCOPES:
            raise PerftrainError(f"compile.scope is one of {', '.join(SCOPES)}; it was {self.scope!r}. Try opt.compile.scope=model.")

    def unavailable(self, plan: Plan) -> str:
        if plan.device.type == "cpu" and sys.platform != "win32" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
            return "torch.compile needs a C++ compiler for the CPU and none is on PATH; install g++ (apt-get install g++)."
        return ""

    def unfit(self, workload: Mapping[str, Any]) -> str:
        return "the model repeats no blocks" if self.scope == "blocks" and workload.get("blocks") == 0 else ""

    def predict(self, now: StepBreakdown) -> Gain:
        share = now.share("forward", "backward")
        return Gain.from_share(share, 1.0, 1.5, f"forward and backward are {share:.0%} of the step; fusing removes part of them")

    def model(self, model: nn.Module, plan: Plan) -> nn.Module:
        parts = repeated_blocks(model) if self.scope == "blocks" else [model]
        if not parts:
            raise PerftrainError(
                f"compile.scope=blocks compiles the blocks that a model repeats; {type(model).__name__} has none. "
                "Try opt.compile.scope=model."
            )
        for part in parts:
            part.compile(mode=self.mode, dynamic=self.dynamic, fullgraph=self.fullgraph)
        return model

    def report(self, model: nn.Module) -> Iterable[str]:
        """Graph breaks and recompiles, each with the first reason."""
        from torch._dynamo.utils import counters, get_compilation_metrics

        breaks = counters["graph_break"]
        again = [f"{m.co_name}: {m.recompile_reason}" for m in get_compilation_metrics() if m.recompile_reason]
        yield f"compiled {counters['stats']['unique_graphs']} graphs"
        if breaks:
            yield f"{counted(sum(breaks.values()), 'graph break')}: {first_line(next(iter(breaks)))}"
        if again:
            yield f"{counted(len(again), 'recompile')}: {first_line(again[0])}"


def counted(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def first_line(text: str) -> str:
    return text.strip().splitlines()[0]
