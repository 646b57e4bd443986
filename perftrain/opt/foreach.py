"""The optimizer's update by one operation over lists of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from perftrain.facts import Bottleneck, Card, Gain, Numerics, PerftrainError, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import OptimizerOptions, Plan, takes


@dataclass(frozen=True)
class Foreach(Switch):
    """Build the optimizer with ``foreach=True``: each operation of the update once for the whole list of parameters.

    Pays where the model has very many small parameters, so that Python and kernel launches between them cost more than the
    arithmetic. On CUDA torch does this by itself; there ``enabled=false`` takes it back, which saves the memory of its
    temporaries. ``fused`` does more where the optimizer has it. Source: documentation of torch.optim, "foreach".
    """

    enabled: bool = True
    """False: one parameter after the other."""

    card: ClassVar[Card] = Card(
        name="foreach",
        summary="each operation of the optimizer step once for all parameters",
        place=Place.OPTIMIZER,
        numerics=Numerics.CLOSE,
        relieves=(Bottleneck.OPTIMIZER_STEP, Bottleneck.LAUNCH_OVERHEAD),
        requires=("an optimizer that takes foreach",),
        conflicts=("fused",),
        cost="temporaries as large as the parameters during the update",
    )

    def unavailable(self, plan: Plan) -> str:
        if plan.device.type == "cuda" and self.enabled:
            return "torch's optimizers do this on CUDA by themselves; opt.foreach.enabled=false takes it back, fused does more."
        if plan.device.type == "cpu" and not self.enabled:
            return "torch's optimizers take one parameter after the other on a CPU by themselves; leave opt.foreach.enabled at true."
        return ""

    def unfit(self, workload: Mapping[str, Any]) -> str:
        known = workload.get("optimizer_takes")
        return "" if known is None or "foreach" in known else f"{workload['optimizer']} has no foreach implementation"

    def predict(self, now: StepBreakdown) -> Gain:
        share = now.share("optimizer") if self.enabled else 0.0
        return Gain.from_share(share, 1.0, 2.0, f"the optimizer is {share:.0%} of the step; only what is around its arithmetic can shrink")

    def optimizer(self, options: OptimizerOptions) -> OptimizerOptions:
        if not takes(options.cls, "foreach"):
            raise PerftrainError(f"foreach needs an optimizer that takes it; this one is {options.cls.__name__}. Leave the switch out.")
        if all(group.get("foreach") is self.enabled for group in options.groups):
            raise PerftrainError(
                f"The program's own optimizer is built with foreach={self.enabled} already; the switch would change nothing. Leave it out."
            )
        return replace(options, arguments={**options.arguments, "foreach": self.enabled, "fused": False})
