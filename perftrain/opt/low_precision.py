"""Linear layers that multiply in 8-bit types."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from perftrain.facts import Bottleneck, Card, Gain, Numerics, PerftrainError, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import Plan

TYPES = {"float8": (8, 9), "int8": (8, 0)}
"""CUDA compute capability from which a device multiplies in the type."""


@dataclass(frozen=True)
class LowPrecision(Switch):
    """Let linear layers quantize inputs and weights on the fly and multiply in ``dtype`` (torchao); weights stay as they are.

    Pays for large matrix products (thousands of rows and columns) on a device with units for the type, and only together
    with compile, which fuses the scaling; best with amp in bfloat16. Not for small layers, where scaling costs more than the
    product saves, nor for models that are mostly convolutions. Layers whose sizes are no multiples of 16 are left alone.
    ``dtype``: float8 (scaled by tensor), int8. Source: torchao.float8, torchao.prototype.quantized_training.
    """

    dtype: str = "float8"

    card: ClassVar[Card] = Card(
        name="low_precision",
        summary="linear layers multiply in float8 or int8 (torchao, CUDA)",
        place=Place.EDIT,
        numerics=Numerics.CLOSE,
        relieves=(Bottleneck.COMPUTE_PRECISION,),
        requires=("torchao", "CUDA compute capability 8.9 (float8) or 8.0 (int8)", "compile, for speed"),
        cost="three bits of mantissa in products (float8); scaling kernels",
    )

    def __post_init__(self) -> None:
        if self.dtype not in TYPES:
            raise PerftrainError(
                f"low_precision.dtype is one of {', '.join(TYPES)}; it was {self.dtype!r}. Try opt.low_precision.dtype=float8."
            )

    def unavailable(self, plan: Plan) -> str:
        if plan.device.type != "cuda":
            return f"torchao multiplies in 8-bit types on CUDA; on {plan.device.type} it only imitates them, more slowly."
        needed, found = TYPES[self.dtype], torch.cuda.get_device_capability(plan.device)
        if found < needed:
            name = torch.cuda.get_device_name(plan.device)
            return f"{self.dtype} needs CUDA compute capability {needed[0]}.{needed[1]}; {name} has {found[0]}.{found[1]}."
        return "" if importlib.util.find_spec("torchao") else "it needs torchao, which is not installed: pip install torchao"

    def unfit(self, workload: Mapping[str, Any]) -> str:
        return "no linear layer has sizes that are multiples of 16" if workload.get("linears_by_16") == 0 else ""

    def predict(self, now: StepBreakdown) -> Gain:
        share = now.share("forward", "backward")
        return Gain.from_share(share, 1.0, 1.6, f"forward and backward are {share:.0%} of the step; only linear layers can shrink")

    def model(self, model: nn.Module, plan: Plan) -> nn.Module:
        if not any(by_16(module) for module in model.modules()):
            raise PerftrainError(
                f"low_precision converts linear layers whose sizes are multiples of 16; {type(model).__name__} has none. "
                "Leave the switch out."
            )
        if self.dtype == "float8":
            from torchao.float8 import convert_to_float8_training  # pyright: ignore[reportMissingImports]

            return convert_to_float8_training(model, module_filter_fn=by_16)
        from torchao.prototype.quantized_training import int8_mixed_precision_training  # pyright: ignore[reportMissingImports]
        from torchao.quantization import quantize_  # pyright: ignore[reportMissingImports]

        quantize_(model, int8_mixed_precision_training(), filter_fn=by_16)
        return model


def by_16(module: nn.Module, name: str = "") -> bool:
    """Whether it is a linear layer that the 8-bit units can take."""
    return isinstance(module, nn.Linear) and module.in_features % 16 == 0 and module.out_features % 16 == 0
