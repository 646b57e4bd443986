"""Update each parameter as soon as its gradient is complete, inside the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from perftrain.facts import Bottleneck, Card, Gain, Numerics, PerftrainError, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import Plan, StepFunctions, nothing


@dataclass(frozen=True)
class OptimizerInBackward(Switch):
    """Step and free each gradient in the backward pass, so that never all of them are in memory at once.

    Pays where memory is short: it saves about the size of the gradients. Each update finds its gradient still in the cache,
    but every parameter has a Python call of its own: models of many small parameters become slower. The time of the updates
    moves from the optimizer's phase into backward's. Not with what needs all gradients together: clipping by norm, loss
    scaling (float16), several micro-batches, gradients averaged over ranks. The same arithmetic in another order of
    parameters, so losses are the same bit for bit. The model keeps the hooks: do not train it without the switch afterwards.
    Source: PyTorch tutorial "How to save memory by fusing the optimizer step into the backward pass".
    """

    card: ClassVar[Card] = Card(
        name="optimizer_in_backward",
        summary="update each parameter inside backward and free its gradient at once",
        place=Place.OPTIMIZER,
        numerics=Numerics.EXACT,
        relieves=(Bottleneck.MEMORY_CAPACITY, Bottleneck.OPTIMIZER_STEP),
        requires=("no clipping, no loss scaling, one backward pass a step, one rank",),
        conflicts=("accumulation", "cuda_graph", "fused_clip"),
        cost="a Python call for each parameter and step; no gradients are left to look at after backward",
    )

    def unavailable(self, plan: Plan) -> str:
        if plan.compute_dtype == torch.float16:
            return "loss scaling (float16) must see all gradients before the update; use opt.amp.dtype=bfloat16."
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return "gradients must be averaged over the ranks before the update."
        return ""

    def unfit(self, workload: Mapping[str, Any]) -> str:
        return "clipping must see all gradients before the first update" if workload.get("clip_norm") is not None else ""

    def predict(self, now: StepBreakdown) -> Gain:
        share = now.share("optimizer")
        return Gain.from_share(share, 1.0, 1.3, f"saves memory; the optimizer, {share:.0%} of the step, finds gradients cached")

    def step(self, functions: StepFunctions) -> StepFunctions:
        if functions.clip_norm is not None:
            raise PerftrainError(
                "optimizer_in_backward updates before all gradients are known, and this program clips them by their norm. "
                "Leave the switch out, or train without clip_norm."
            )
        for number, group in enumerate(functions.optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(updater(functions.optimizer, number, parameter))
        functions.optimizer._opt_called = True  # type: ignore[attr-defined]  # what torch's schedulers look for
        return functions.with_(optimizer_step=nothing, zero_grad=nothing)


def updater(optimizer: torch.optim.Optimizer, number: int, parameter: Tensor) -> Callable[[Tensor], None]:
    """A hook that updates ``parameter`` as ``optimizer`` would.

    It steps a twin that holds only this parameter. The twin shares the state, so ``optimizer.state_dict()`` stays whole, and
    takes its settings from the group at every step, so schedules act.
    """
    twin = object.__new__(type(optimizer))
    twin.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})

    def update(_: Tensor) -> None:
        twin.param_groups = [{**optimizer.param_groups[number], "params": [parameter]}]
        twin.step()
        parameter.grad = None

    return update
