"""The whole step as one CUDA graph: recorded once, then replayed by a single launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from perftrain.facts import Bottleneck, Card, Gain, Numerics, PerftrainError, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import Batch, Losses, OptimizerOptions, Plan, StepFunctions, nothing

ARGUMENTS = {torch.optim.Adam: "capturable", torch.optim.AdamW: "capturable", torch.optim.SGD: "fused"}
"""Optimizers that can be recorded with a learning rate that may change later, and the argument that makes them so."""


@dataclass(frozen=True)
class CudaGraph(Switch):
    """Record forward, backward, clipping and update in a CUDA graph after ``warmup_steps`` ordinary steps, and replay it.

    Pays where the device waits for the host: many short kernels, small batches. Every batch must have the shapes of the first
    (``drop_last=True``, no varying lengths), and nothing in the step may wait for the device (``.item()``, printing). The step's
    time all appears as forward. Not where kernels are long, nor with loss scaling (float16), whose decisions are made on the
    host. Adam, AdamW and SGD only: their learning rate becomes a tensor on the device, so that schedules still act.
    Losses can differ in the last bits, since a recorded SGD is a fused one. Source: PyTorch documentation, "CUDA Graphs".
    """

    warmup_steps: int = 3
    """Ordinary steps first: libraries choose their kernels and allocate what a recording must not."""

    card: ClassVar[Card] = Card(
        name="cuda_graph",
        summary="record the whole step once and replay it with one launch (CUDA)",
        place=Place.GRAPH_CAPTURE,
        numerics=Numerics.CLOSE,
        relieves=(Bottleneck.LAUNCH_OVERHEAD, Bottleneck.HOST_PYTHON),
        requires=("CUDA", "batches of one shape", "Adam, AdamW or SGD", "one rank"),
        conflicts=("accumulation", "optimizer_in_backward"),
        cost="memory of one step held for good",
    )

    def __post_init__(self) -> None:
        if self.warmup_steps < 1:
            raise PerftrainError(f"cuda_graph.warmup_steps is 1 or more; it was {self.warmup_steps}. Try opt.cuda_graph.warmup_steps=3.")

    def unavailable(self, plan: Plan) -> str:
        if plan.device.type != "cuda":
            return f"CUDA graphs exist on CUDA devices only; this run is on {plan.device.type}."
        if plan.compute_dtype == torch.float16:
            return "loss scaling (float16) decides on the host whether to update; use opt.amp.dtype=bfloat16."
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return "several ranks are not supported in a recorded step."
        return ""

    def unfit(self, workload: Mapping[str, Any]) -> str:
        name = workload.get("optimizer", "Adam")
        return "" if name in (cls.__name__ for cls in ARGUMENTS) else f"only Adam, AdamW and SGD can be recorded; the program uses {name}"

    def predict(self, now: StepBreakdown) -> Gain:
        share = now.share("forward", "backward", "optimizer")
        return Gain.from_share(share, 1.0, 3.0, f"launches are somewhere in {share:.0%} of the step")

    def optimizer(self, options: OptimizerOptions) -> OptimizerOptions:
        argument = ARGUMENTS.get(options.cls)
        if argument is None:
            raise PerftrainError(f"cuda_graph records Adam, AdamW and SGD; this optimizer is {options.cls.__name__}. Leave the switch out.")
        more = {"fused": True, "foreach": False} if argument == "fused" else {argument: True}
        return replace(options, arguments={**options.arguments, **more})

    def step(self, functions: StepFunctions) -> StepFunctions:
        for group in functions.optimizer.param_groups:
            device = group["params"][0].device
            if device.type != "cuda":
                raise PerftrainError(f"cuda_graph records on CUDA devices; a parameter is on {device}. Try device=cuda.")
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
        recorded = _Recorded(functions, self.warmup_steps)
        return functions.with_(forward=recorded.step, backward=_done, clip=nothing, optimizer_step=nothing)


def _done(loss: Tensor) -> None:
    """The backward pass is part of the recording."""


class _Recorded:
    """Steps that are ordinary at first, then recorded, then replayed."""

    def __init__(self, functions: StepFunctions, warmup_steps: int) -> None:
        self.functions = functions
        self.left = warmup_steps
        self.stream = torch.cuda.Stream(next(functions.model.parameters()).device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.batch: Batch = None
        self.losses: Losses = {}

    def step(self, batch: Batch) -> Losses:
        if self.left:
            self.left -= 1
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                losses = {name: loss.detach() for name, loss in self._whole(batch).items()}
            torch.cuda.current_stream().wait_stream(self.stream)
            return losses
        if self.graph is None:
            self._record(batch)
        else:
            self._fill(batch)
        assert self.graph is not None
        self.graph.replay()
        return {name: loss.clone() for name, loss in self.losses.items()}  # the next replay writes over them

    def _whole(self, batch: Batch) -> Losses:
        do = self.functions
        losses = do.forward(batch)
        do.backward(losses["loss"])
        do.clip()
        do.optimizer_step()
        return losses

    def _record(self, batch: Batch) -> None:
        """Nothing is computed here: the first replay does this batch's step. Gradients are None, so that they are made in the
        recording's own memory."""
        tree_map(_form, batch)  # refuses what cannot be copied
        self.batch = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, batch)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                losses = self._whole(self.batch)
        except RuntimeError as error:
            raise PerftrainError(
                f"cuda_graph could not record the step, in which nothing may wait for the device (.item(), .cpu(), print): {error} "
                "Leave the switch out."
            ) from error
        self.losses = {name: loss.detach() for name, loss in losses.items()}
        self.graph = graph

    def _fill(self, batch: Batch) -> None:
        (ours, here), (theirs, there) = tree_flatten(self.batch), tree_flatten(batch)
        recorded, seen = [_form(leaf) for leaf in ours], [_form(leaf) for leaf in theirs]
        if recorded != seen or here != there:
            raise PerftrainError(
                f"cuda_graph replays one recorded shape; it recorded {', '.join(recorded)} and then saw {', '.join(seen)}. "
                "Give the loader drop_last=True and batches of one shape, or leave the switch out."
            )
        for mine, other in zip(ours, theirs, strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(other, non_blocking=True)


def _form(leaf: Any) -> str:
    """What must be equal in every batch."""
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype} {tuple(leaf.shape)}"
    if leaf is None or isinstance(leaf, (bool, int, float, str)):
        return repr(leaf)
    raise PerftrainError(
        f"cuda_graph copies tensors in tuples, lists and dicts; the batch holds a {type(leaf).__name__}. Leave the switch out."
    )
