"""The optimizer's update of all parameters in one kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from perftrain.facts import Bottleneck, Card, Gain, Numerics, PerftrainError, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import OptimizerOptions, Plan, takes


@dataclass(frozen=True)
class Fused(Switch):
    """Build the optimizer with ``fused=True``: one pass over parameter, gradient and state instead of one for each operation.

    Pays where the optimizer's step is a real part of the whole: many parameters and small batches. Torch has such kernels for
    SGD, Adam, AdamW and Adagrad. Nothing to gain where forward and backward dwarf the update, and not for optimizers that do
    their own arithmetic (refused). Source: documentation of torch.optim, "fused" implementations.
    """

    card: ClassVar[Card] = Card(
        name="fused",
        summary="one kernel for the whole optimizer step",
        place=Place.OPTIMIZER,
        numerics=Numerics.CLOSE,
        relieves=(Bottleneck.OPTIMIZER_STEP, Bottleneck.LAUNCH_OVERHEAD),
        requires=("an optimizer that takes fused=True (SGD, Adam, AdamW; Adagrad on a CPU)", "parameters in floating point"),
        conflicts=("foreach",),
        cost="none; sums are rounded in another order",
    )

    def unavailable(self, plan: Plan) -> str:
        return "" if plan.device.type in ("cpu", "cuda") else f"torch has no fused optimizers for {plan.device.type}."

    def unfit(self, workload: Mapping[str, Any]) -> str:
        known = workload.get("optimizer_takes")
        return "" if known is None or "fused" in known else f"{workload['optimizer']} has no fused implementation"

    def predict(self, now: StepBreakdown) -> Gain:
        share = now.share("optimizer")
        return Gain.from_share(share, 1.0, 4.0, f"the optimizer is {share:.0%} of the step; only that can shrink")

    def optimizer(self, options: OptimizerOptions) -> OptimizerOptions:
        if not takes(options.cls, "fused"):
            raise PerftrainError(
                f"fused needs an optimizer that takes fused=True, such as SGD, Adam or AdamW; this one is {options.cls.__name__}. "
                "Leave the switch out."
            )
        if all(group.get("fused") for group in options.groups):
            raise PerftrainError("The program's own optimizer is fused already; the switch would change nothing. Leave it out.")
        return replace(options, arguments={**options.arguments, "fused": True, "foreach": False})
