"""Clipping by norm inside the update of a fused optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from perftrain.facts import Bottleneck, Card, Gain, Numerics, PerftrainError, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import OptimizerOptions, StepFunctions, takes


@dataclass(frozen=True)
class FusedClip(Switch):
    """Compute only the norm of the gradients; the fused optimizer scales them while it reads them anyway.

    The factor goes to the optimizer as ``grad_scale``, by which its kernel divides: one pass over all gradients less. It makes
    the optimizer fused; beside ``fused``, ``+opt=[fused,fused_clip]`` tells what clipping inside gives on top. Pays where
    clipping and update are a real part of the step. Nothing for programs that do not clip, nor for optimizers without a fused
    kernel (both refused). Source: torch.amp.GradScaler, which unscales through the same attribute.
    """

    card: ClassVar[Card] = Card(
        name="fused_clip",
        summary="clip by norm inside the update of a fused optimizer",
        place=Place.STEP,
        numerics=Numerics.CLOSE,
        relieves=(Bottleneck.OPTIMIZER_STEP, Bottleneck.LAUNCH_OVERHEAD),
        requires=("a program that clips gradients by their norm", "an optimizer that takes fused=True"),
        conflicts=("foreach", "low_memory_optimizer", "optimizer_in_backward"),
        cost="none; products are rounded in another order",
    )

    def unfit(self, workload: Mapping[str, Any]) -> str:
        if workload.get("clip_norm", 0) is None:
            return "the program does not clip gradients"
        known = workload.get("optimizer_takes")
        return "" if known is None or "fused" in known else f"{workload['optimizer']} has no fused implementation"

    def predict(self, now: StepBreakdown) -> Gain:
        share = now.share("optimizer")
        return Gain.from_share(share, 1.0, 4.0, f"clipping and update are {share:.0%} of the step; only they can shrink")

    def optimizer(self, options: OptimizerOptions) -> OptimizerOptions:
        if not takes(options.cls, "fused"):
            raise PerftrainError(
                f"fused_clip needs an optimizer that takes fused=True, such as SGD, Adam or AdamW; this one is {options.cls.__name__}. "
                "Leave the switch out."
            )
        return replace(options, arguments={**options.arguments, "fused": True, "foreach": False})

    def step(self, functions: StepFunctions) -> StepFunctions:
        max_norm, optimizer = functions.clip_norm, functions.optimizer
        if max_norm is None:
            raise PerftrainError("fused_clip speeds up clipping by norm; this program has no clip_norm. Leave the switch out.")
        parameters = [p for group in optimizer.param_groups for p in group["params"]]

        def clip() -> None:
            norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            optimizer.grad_scale = torch.clamp((norm + 1e-6) / max_norm, min=1.0)  # type: ignore[attr-defined]

        return functions.with_(clip=clip)
