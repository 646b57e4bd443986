"""Data parallel training: every process holds the whole model and trains on its part of each batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from perftrain.data.ranks import check_ranks, exchanging_last, part_normalized, ranks_for, say_ranks, shared_out, why_no_ranks
from perftrain.facts import Bottleneck, Card, Gain, Numerics, PerftrainError, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import Batch, LoaderOptions, Plan, StepFunctions


@dataclass(frozen=True)
class DDP(Switch):
    """Train in ``ranks`` processes, one a device, each on its part of every batch (``DistributedDataParallel``).

    The batch of the loader is the batch of all ranks together, so the training stays the same: equal samples in equal steps,
    losses are means over the ranks. Where a rank's loss is a mean over something that the ranks have unequally much of (tokens
    without padding), the mean over ranks is not quite the batch's. While the backward pass still computes, gradients are
    averaged in buckets of ``bucket_mb``; with accumulation only in the last micro-batch. Every rank draws its own dropout and
    augmentation. Buffers (running statistics of BatchNorm) are rank 0's. BatchNorm normalizes over a rank's part of the batch
    only, which is another training where that part is small; ``sync_batchnorm`` computes its statistics over all ranks (CUDA).

    Pays with several devices whose part of the batch still keeps them busy. Not on one device or on a CPU whose cores one
    process already uses (there it exists to test and to study), nor where the exchange of gradients takes longer than the
    backward pass. Model and optimizer must fit each device: see fsdp. A smaller ``bucket_mb`` starts the exchange earlier, a
    larger one sends fewer messages. ``gradient_as_bucket_view`` saves one copy of the gradients; ``static_graph`` is for models
    that use the same parameters in every step (it lets DDP skip what it would check).

    The command line starts the ranks itself; a script of your own is started by ``torchrun --nproc-per-node=2 train.py``.
    Source: Li et al., PyTorch Distributed, VLDB 2020; torch.nn.parallel.DistributedDataParallel.
    """

    ranks: int | None = None
    """null: what torchrun started, else one a CUDA device; on the CPU 2."""
    bucket_mb: float = 25.0
    """MiB of gradients that travel together."""
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    sync_batchnorm: bool = False

    card: ClassVar[Card] = Card(
        name="ddp",
        summary="several processes, each with the whole model and its part of every batch",
        place=Place.DATA_PARALLEL,
        numerics=Numerics.CLOSE,
        relieves=(Bottleneck.COMPUTE_SATURATED,),
        requires=("several CUDA devices (gloo on the CPU, to study)", "a DataLoader whose batch_size the ranks can divide"),
        conflicts=("fsdp", "optimizer_in_backward", "cuda_graph"),
        cost="model, gradients and optimizer on every device; an exchange of all gradients in every step",
    )

    def __post_init__(self) -> None:
        check_ranks("ddp", self.ranks)
        if not self.bucket_mb > 0:
            raise PerftrainError(f"ddp.bucket_mb is above 0; it was {self.bucket_mb}. Try opt.ddp.bucket_mb=25.")

    def unavailable(self, plan: Plan) -> str:
        if self.sync_batchnorm and plan.device.type != "cuda":
            return "torch has SyncBatchNorm for CUDA devices only; leave out opt.ddp.sync_batchnorm."
        return why_no_ranks("ddp", self.ranks, plan.device)

    def plan(self, plan: Plan) -> Plan:
        return replace(plan, ranks=ranks_for(self.ranks, plan.device))

    def describe(self, plan: Plan) -> str:
        return say_ranks(ranks_for(self.ranks, plan.device), plan.device)

    def report(self, model: nn.Module) -> Iterable[str]:
        return [] if self.sync_batchnorm else part_normalized(model)

    def predict(self, now: StepBreakdown) -> Gain:
        if not torch.cuda.is_available():
            return Gain(1.0, 1.0, "on the CPU the ranks share the cores that one process already uses")
        ranks, share = ranks_for(self.ranks, torch.device("cuda")), now.share("data_wait", "copy", "forward", "backward")
        because = f"{ranks} ranks share data, forward and backward, {share:.0%} of the step; the exchange of gradients comes on top"
        return Gain.from_share(share, 1.0, min(4, max(1, ranks)), because)

    def loader(self, options: LoaderOptions) -> LoaderOptions | Iterable[Batch]:
        return shared_out(options, "ddp")

    def model(self, model: nn.Module, plan: Plan) -> nn.Module:
        if self.sync_batchnorm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return DistributedDataParallel(
            model,
            bucket_cap_mb=self.bucket_mb,  # type: ignore[arg-type]
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            static_graph=self.static_graph,
        )

    def step(self, functions: StepFunctions) -> StepFunctions:
        if functions.plan.micro_batches == 1:
            return functions
        wrapper = next(m for m in functions.model.modules() if isinstance(m, DistributedDataParallel))

        def exchange(on: bool) -> None:  # what no_sync() does around a forward pass
            wrapper.require_backward_grad_sync = on

        # a static graph is learnt in the first backward pass, and only if that one exchanges
        forward = exchanging_last(functions.forward, functions.plan.micro_batches, exchange, first_step_too=self.static_graph)
        return replace(functions, forward=forward)
