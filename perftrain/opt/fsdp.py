"""Fully sharded data parallel training: parameters, gradients and optimizer are cut up among the ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from perftrain.data.ranks import check_ranks, exchanging_last, part_normalized, ranks_for, say_ranks, shared_out, why_no_ranks
from perftrain.facts import Bottleneck, Card, Gain, Numerics, PerftrainError, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import Batch, LoaderOptions, Plan, StepFunctions, repeated_blocks

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class FSDP(Switch):
    """Keep only a part of every parameter, gradient and optimizer state on each of ``ranks`` processes (``fully_shard``).

    Each repeated block (transformer layer, residual block) gathers its parameters before its forward pass and again before its
    backward pass; gradients are averaged and scattered back. What belongs to no block is one more unit. The loader's batch is
    the batch of all ranks together, as with ddp, and what is said there of dropout, means and BatchNorm holds here; buffers
    stay each rank's own.

    Pays where model, gradients and optimizer do not fit one device, or leave too little room for the batch. Not for models that fit:
    parameters travel twice instead of gradients once, so ddp is faster. ``reshard_after_forward: false`` keeps a block's
    parameters until its backward pass: more memory, less traffic.

    ``dtype``: what parameters travel and compute in; null takes amp's type where amp is on, else float32. Gradients are
    averaged in ``reduce_dtype``; the parts that are kept and updated stay float32.

    The command line starts the ranks itself; a script of your own is started by ``torchrun --nproc-per-node=2 train.py``.
    Source: Zhao et al., PyTorch FSDP, VLDB 2023; torch.distributed.fsdp.fully_shard.
    """

    ranks: int | None = None
    """null: what torchrun started, else one a CUDA device; on the CPU 2."""
    dtype: str | None = None
    reduce_dtype: str = "float32"
    reshard_after_forward: bool = True

    card: ClassVar[Card] = Card(
        name="fsdp",
        summary="several processes, each with a part of parameters, gradients, optimizer and of every batch",
        place=Place.DATA_PARALLEL,
        numerics=Numerics.CLOSE,
        relieves=(Bottleneck.MEMORY_CAPACITY,),
        requires=("several CUDA devices (gloo on the CPU, to study)", "a DataLoader whose batch_size the ranks can divide"),
        conflicts=("ddp", "optimizer_in_backward", "cuda_graph"),
        cost="all parameters travel twice in every step, and all gradients once",
    )

    def __post_init__(self) -> None:
        check_ranks("fsdp", self.ranks)
        for name, value in (("dtype", self.dtype or "float32"), ("reduce_dtype", self.reduce_dtype)):
            if value not in DTYPES:
                raise PerftrainError(f"fsdp.{name} is one of {', '.join(DTYPES)}; it was {value!r}. Try opt.fsdp.{name}=bfloat16.")

    def unavailable(self, plan: Plan) -> str:
        return why_no_ranks("fsdp", self.ranks, plan.device)

    def plan(self, plan: Plan) -> Plan:
        return replace(plan, ranks=ranks_for(self.ranks, plan.device))

    def describe(self, plan: Plan) -> str:
        return say_ranks(ranks_for(self.ranks, plan.device), plan.device)

    def report(self, model: nn.Module) -> Iterable[str]:
        return part_normalized(model)

    def predict(self, now: StepBreakdown) -> Gain:
        if not torch.cuda.is_available():
            return Gain(1.0, 1.0, "on the CPU the ranks share the cores that one process already uses")
        ranks, share = ranks_for(self.ranks, torch.device("cuda")), now.share("data_wait", "copy", "forward", "backward", "optimizer")
        because = f"{ranks} ranks share {share:.0%} of the step; gathering parameters and averaging gradients come on top"
        return Gain.from_share(share, 1.0, min(4, max(1, ranks)), because)

    def loader(self, options: LoaderOptions) -> LoaderOptions | Iterable[Batch]:
        return shared_out(options, "fsdp")

    def model(self, model: nn.Module, plan: Plan) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        for tensor in (*model.parameters(), *model.buffers()):
            from_rank_0(tensor.detach())
        dtype = DTYPES[self.dtype] if self.dtype else plan.compute_dtype
        param_dtype = None if dtype is torch.float32 else dtype
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=DTYPES[self.reduce_dtype])
        mesh = init_device_mesh(plan.device.type, (dist.get_world_size(),))
        blocks = repeated_blocks(model)
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=self.reshard_after_forward)
        whole = replace(policy, output_dtype=torch.float32)  # the loss is computed from it
        fully_shard(model, mesh=mesh, mp_policy=whole, reshard_after_forward=None if blocks else self.reshard_after_forward)
        return model

    def step(self, functions: StepFunctions) -> StepFunctions:
        if functions.plan.micro_batches == 1:
            return functions
        exchange = functions.model.set_requires_gradient_sync  # type: ignore[union-attr]
        return replace(functions, forward=exchanging_last(functions.forward, functions.plan.micro_batches, exchange))  # type: ignore[arg-type]


def from_rank_0(tensor: Tensor) -> None:
    """Sharding takes it for granted that all ranks start with equal weights."""
    whole = tensor.contiguous()
    dist.broadcast(whole, 0)
    if whole is not tensor:
        tensor.copy_(whole)
