"""Let cuDNN try its convolution algorithms and keep the fastest for each shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from perftrain.facts import Bottleneck, Card, Gain, Numerics, PerftrainError, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import Plan


@dataclass(frozen=True)
class CudnnBenchmark(Switch):
    """``torch.backends.cudnn.benchmark``: the first convolution of each shape tries several algorithms, later ones use the winner.

    Pays for convolutional networks with images of one size. Not for sizes that change from batch to batch: every new shape is
    tried anew. CUDA only. Source: PyTorch performance tuning guide.
    """

    card: ClassVar[Card] = Card(
        name="cudnn_benchmark",
        summary="cuDNN tries its convolution algorithms and keeps the fastest (CUDA)",
        place=Place.PROCESS,
        numerics=Numerics.CLOSE,
        relieves=(Bottleneck.COMPUTE_SATURATED, Bottleneck.COMPUTE_LAYOUT),
        requires=("CUDA with cuDNN", "a model with 2-D convolutions"),
        conflicts=("deterministic",),
        cost="trials at the first step and at each new shape; their workspace memory",
    )

    def unavailable(self, plan: Plan) -> str:
        if plan.device.type != "cuda":
            return f"cuDNN works on CUDA devices; this one is {plan.device.type}."
        return "" if torch.backends.cudnn.is_available() else "this torch has no cuDNN."

    def unfit(self, workload: Mapping[str, Any]) -> str:
        return "the model has no 2-D convolutions" if workload.get("convolutions") == 0 else ""

    def predict(self, now: StepBreakdown) -> Gain:
        share = now.share("forward", "backward")
        return Gain.from_share(share, 1.0, 1.3, f"forward and backward are {share:.0%} of the step; convolutions are a part of that")

    @contextmanager
    def process(self) -> Iterator[None]:  # type: ignore[override]
        before = torch.backends.cudnn.benchmark
        try:
            torch.backends.cudnn.benchmark = True
            yield
        finally:
            torch.backends.cudnn.benchmark = before

    def model(self, model: nn.Module, plan: Plan) -> nn.Module:
        if not any(p.dim() == 4 for p in model.parameters()):
            raise PerftrainError(f"cudnn_benchmark is about 2-D convolutions; {type(model).__name__} has none. Leave the switch out.")
        return model
