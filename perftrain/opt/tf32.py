"""Lower internal precision of float32 matrix products and convolutions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from perftrain.facts import Bottleneck, Card, Gain, Numerics, PerftrainError, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import Plan

PRECISIONS = ("tf32", "bf16", "ieee")


@dataclass(frozen=True)
class TF32(Switch):
    """Let float32 products run at ``precision`` inside (``torch.backends.*.fp32_precision``); tensors stay float32.

    On CUDA it sets matmul, cuDNN convolution and RNN (only tf32 and ieee exist there). On a CPU it sets oneDNN's matmul,
    convolution and RNN: ``tf32`` acts only on CPUs that have such a unit, ``bf16`` on those with AMX or AVX512-BF16; elsewhere
    oneDNN ignores it. Not for a step that waits for data, nor beside amp, which already lowers the precision.
    """

    precision: str = "tf32"

    card: ClassVar[Card] = Card(
        name="tf32",
        summary="float32 matmuls and convolutions at TF32 precision inside (CPU: oneDNN's fp32_precision)",
        place=Place.PROCESS,
        numerics=Numerics.CLOSE,
        relieves=(Bottleneck.COMPUTE_PRECISION,),
        requires=("CUDA compute capability 8.0, or a CPU on which oneDNN offers it",),
        cost="ten bits of mantissa instead of 23 in products",
    )

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise PerftrainError(
                f"tf32.precision is one of {', '.join(PRECISIONS)}; it was {self.precision!r}. Try opt.tf32.precision=tf32."
            )

    def unavailable(self, plan: Plan) -> str:
        if plan.device.type == "cuda":
            if self.precision == "bf16":
                return "CUDA offers tf32 and ieee, not bf16; use opt.tf32.precision=tf32."
            if torch.cuda.get_device_capability(plan.device) < (8, 0):
                return f"{torch.cuda.get_device_name(plan.device)} has no TF32 units (compute capability 8.0 or later)."
        return ""

    def describe(self, plan: Plan) -> str:
        names = ", ".join(name for name, _ in _settings(plan.device.type))
        aside = "" if plan.device.type == "cuda" else " (oneDNN uses it only where this CPU has the unit)"
        return f"sets fp32_precision = '{self.precision}' for {names}{aside}"

    def predict(self, now: StepBreakdown) -> Gain:
        share = now.share("forward", "backward")
        return Gain.from_share(share, 1.0, 2.0, f"forward and backward are {share:.0%} of the step; only their products can shrink")

    @contextmanager
    def process(self) -> Iterator[None]:  # type: ignore[override]
        settings = _settings("cpu")
        if torch.cuda.is_available() and self.precision != "bf16":
            settings += _settings("cuda")
        before = [setting.fp32_precision for _, setting in settings]
        try:
            for _, setting in settings:
                setting.fp32_precision = self.precision
            yield
        finally:
            for (_, setting), value in zip(settings, before, strict=True):
                setting.fp32_precision = value


def _settings(device_type: str) -> list[tuple[str, Any]]:
    """The places where torch keeps the precision, by name. The new API only: mixing it with ``allow_tf32`` raises."""
    if device_type == "cuda":
        return [
            ("torch.backends.cuda.matmul", torch.backends.cuda.matmul),
            ("torch.backends.cudnn.conv", torch.backends.cudnn.conv),  # type: ignore[attr-defined]
            ("torch.backends.cudnn.rnn", torch.backends.cudnn.rnn),  # type: ignore[attr-defined]
        ]
    return [
        ("torch.backends.mkldnn.matmul", torch.backends.mkldnn.matmul),  # type: ignore[attr-defined]
        ("torch.backends.mkldnn.conv", torch.backends.mkldnn.conv),  # type: ignore[attr-defined]
        ("torch.backends.mkldnn.rnn", torch.backends.mkldnn.rnn),  # type: ignore[attr-defined]
    ]
