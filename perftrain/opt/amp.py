"""Automatic mixed precision: forward and loss in a 16-bit type, weights and optimizer in float32."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from perftrain.facts import Bottleneck, Card, Gain, Numerics, PerftrainError, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import Batch, Losses, Plan, StepFunctions

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class AMP(Switch):
    """Run matrix products and convolutions in ``dtype`` through ``torch.autocast``; numerically delicate ops stay float32.

    Pays where the step is bound by matrix products or convolutions and the device has units for the type (tensor cores,
    AMX). Not for steps that wait for data, tiny layers, or where float32 already runs on the same units (TF32).
    ``float16`` scales the loss (``torch.amp.GradScaler``) and unscales before clipping; ``bfloat16`` needs neither.
    """

    dtype: str = "bfloat16"

    card: ClassVar[Card] = Card(
        name="amp",
        summary="forward and loss in bfloat16 (or float16 with loss scaling) through autocast",
        place=Place.PRECISION,
        numerics=Numerics.CLOSE,
        relieves=(Bottleneck.COMPUTE_PRECISION,),
        requires=("a device that computes the type natively",),
        cost="a 16-bit copy of the weights in every forward pass",
    )

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise PerftrainError(f"amp.dtype is one of {', '.join(DTYPES)}; it was {self.dtype!r}. Try opt.amp.dtype=bfloat16.")

    def unavailable(self, plan: Plan) -> str:
        if plan.device.type == "cuda" and self.dtype == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
            return f"{torch.cuda.get_device_name(plan.device)} has no bfloat16 units; use opt.amp.dtype=float16."
        return ""

    def plan(self, plan: Plan) -> Plan:
        return replace(plan, compute_dtype=DTYPES[self.dtype])

    def predict(self, now: StepBreakdown) -> Gain:
        share = now.share("forward", "backward")
        return Gain.from_share(share, 1.0, 3.0, f"forward and backward are {share:.0%} of the step; only they can shrink")

    def step(self, functions: StepFunctions) -> StepFunctions:
        device_type = next(functions.model.parameters()).device.type
        dtype = DTYPES[self.dtype]

        def forward(batch: Batch) -> Losses:
            with torch.autocast(device_type, dtype):
                return functions.forward(batch)

        return replace(functions, forward=forward) if self.dtype == "bfloat16" else scaled(replace(functions, forward=forward), device_type)


def scaled(functions: StepFunctions, device_type: str) -> StepFunctions:
    """Loss scaling around backward, clip and step: float16 gradients would underflow without it."""
    scaler = torch.amp.GradScaler(device_type)  # type: ignore[attr-defined]

    def backward(loss: Tensor) -> None:
        functions.backward(scaler.scale(loss))

    def clip() -> None:
        scaler.unscale_(functions.optimizer)
        functions.clip()

    def optimizer_step() -> None:
        scaler.step(functions.optimizer)
        scaler.update()

    return replace(functions, backward=backward, clip=clip, optimizer_step=optimizer_step)
