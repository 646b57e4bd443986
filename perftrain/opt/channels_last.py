"""Images and convolution weights with the channels innermost in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from perftrain.facts import Bottleneck, Card, Gain, Numerics, PerftrainError, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import Batch, Losses, Plan, StepFunctions


@dataclass(frozen=True)
class ChannelsLast(Switch):
    """Store 4-D weights and inputs as NHWC, the layout that tensor cores and oneDNN compute convolutions in.

    Saves the layout conversions around each convolution; most together with amp. Nothing for models without convolutions
    (refused), little for very few channels.
    """

    card: ClassVar[Card] = Card(
        name="channels_last",
        summary="convolution weights and images in NHWC memory order",
        place=Place.EDIT,
        numerics=Numerics.CLOSE,
        relieves=(Bottleneck.COMPUTE_LAYOUT,),
        requires=("a model with 2-D convolutions",),
        cost="one copy of each input batch",
    )

    def unfit(self, workload: Mapping[str, Any]) -> str:
        return "the model has no 2-D convolutions" if workload.get("convolutions") == 0 else ""

    def predict(self, now: StepBreakdown) -> Gain:
        share = now.share("forward", "backward")
        return Gain.from_share(share, 1.0, 1.3, f"forward and backward are {share:.0%} of the step; layout conversions are a part of that")

    def model(self, model: nn.Module, plan: Plan) -> nn.Module:
        if not any(p.dim() == 4 for p in model.parameters()):
            raise PerftrainError(
                f"channels_last reorders 4-D (convolution) weights; {type(model).__name__} has none. Leave the switch out."
            )
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def step(self, functions: StepFunctions) -> StepFunctions:
        def forward(batch: Batch) -> Losses:
            return functions.forward(tree_map(_reorder, batch))

        return replace(functions, forward=forward)


def _reorder(value: object) -> object:
    if isinstance(value, Tensor) and value.dim() == 4 and value.is_floating_point():
        return value.contiguous(memory_format=torch.channels_last)
    return value
