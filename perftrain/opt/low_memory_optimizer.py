"""Adam with its moments kept in 8 bits or less."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from perftrain.facts import Bottleneck, Card, Gain, Numerics, PerftrainError, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import OptimizerOptions, Plan

STATES = {"int8": "8bit", "float8": "Fp8", "int4": "4bit"}
KEPT = ("params", "lr", "initial_lr", "betas", "eps", "weight_decay", "amsgrad")
"""What torchao's Adam takes of a parameter group."""
SMALLEST = 4096
"""Elements of a parameter from which on torchao keeps its moments in few bits."""


@dataclass(frozen=True)
class LowMemoryOptimizer(Switch):
    """Replace Adam or AdamW by torchao's, whose two moments take 8 bits a number (int4: 4) instead of 32.

    Pays where memory is short: Adam's state shrinks from 8 bytes a parameter to about 2. The update quantizes and dequantizes in
    kernels that torch.compile makes for each shape of parameter (seconds to minutes in the first step), so it is seldom
    faster. Parameters of fewer than 4096 elements keep float32 moments. Not where the state is small beside the activations.
    ``states``: int8, float8 (CUDA compute capability 8.9), int4 (noticeably coarser).
    Source: torchao.optim; Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization".
    """

    states: str = "int8"

    card: ClassVar[Card] = Card(
        name="low_memory_optimizer",
        summary="Adam's moments in 8 bits or less (torchao)",
        place=Place.OPTIMIZER,
        numerics=Numerics.CLOSE,
        relieves=(Bottleneck.MEMORY_CAPACITY,),
        requires=("torchao", "Adam or AdamW", "a C++ compiler (CPU) or Triton (CUDA)"),
        conflicts=("fused", "foreach", "cuda_graph", "fused_clip"),
        cost="a kernel compiled for each shape of parameter in the first step",
    )

    def __post_init__(self) -> None:
        if self.states not in STATES:
            raise PerftrainError(
                f"low_memory_optimizer.states is one of {', '.join(STATES)}; it was {self.states!r}. "
                "Try opt.low_memory_optimizer.states=int8."
            )

    def unavailable(self, plan: Plan) -> str:
        if importlib.util.find_spec("torchao") is None:
            return "it needs torchao, which is not installed: pip install torchao"
        if plan.device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
            return "its kernels are compiled with a C++ compiler and none is on PATH; install g++ (apt-get install g++)."
        if self.states == "float8" and plan.device.type == "cuda" and torch.cuda.get_device_capability(plan.device) < (8, 9):
            return "float8 moments need CUDA compute capability 8.9; use opt.low_memory_optimizer.states=int8."
        return ""

    def unfit(self, workload: Mapping[str, Any]) -> str:
        name = workload.get("optimizer", "Adam")
        return "" if name in ("Adam", "AdamW") else f"it replaces Adam and AdamW; the program uses {name}"

    def predict(self, now: StepBreakdown) -> Gain:
        return Gain(1.0, 1.0, "it saves memory, not time")

    def optimizer(self, options: OptimizerOptions) -> OptimizerOptions:
        if options.cls not in (torch.optim.Adam, torch.optim.AdamW):
            raise PerftrainError(
                f"low_memory_optimizer replaces torch.optim.Adam or AdamW; this program uses {options.cls.__name__}. Leave the switch out."
            )
        if any(group.get("maximize") for group in options.groups):
            raise PerftrainError("low_memory_optimizer minimizes only; a parameter group has maximize=True. Leave the switch out.")
        from torchao import optim  # pyright: ignore[reportMissingImports]

        cls = getattr(optim, options.cls.__name__ + STATES[self.states])
        groups = tuple({name: group[name] for name in KEPT if name in group} for group in options.groups)
        return replace(options, cls=cls, groups=groups)

    def report(self, model: nn.Module) -> Iterable[str]:
        large = sum(p.numel() for p in model.parameters() if p.numel() >= SMALLEST)
        return (f"moments of {large / max(1, sum(p.numel() for p in model.parameters())):.0%} of the parameters are in {self.states}",)
