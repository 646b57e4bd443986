"""The ranks that train together, as the engine sees them: which one this is, and what they tell each other."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from perftrain.data.ranks import side_group, under_torchrun
from perftrain.engine.process import seed_everything
from perftrain.facts import PerftrainError
from perftrain.opt.seams import Plan

TIMEOUT = timedelta(seconds=300)
"""Silence of another rank after which an exchange fails."""


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together. Alone, everything is as it is without ranks."""

    rank: int = 0
    size: int = 1

    def mean(self, values: Sequence[float]) -> list[float]:
        """Each value averaged over the ranks. Every rank must call it at the same step."""
        means = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(means, group=side_group("losses"))
        return (means / self.size).tolist()

    def agreed(self, value: float) -> float:
        """Rank 0's value, on every rank: what depends on a clock must not be decided by each for itself."""
        if self.size == 1:
            return value
        told = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(told, 0, group=side_group("losses"))
        return told.item()

    def spread(self) -> None:
        """Other random numbers on every rank, so that dropout and augmentation are not copies of rank 0's."""
        if self.rank:
            seed_everything((torch.initial_seed() + self.rank) % 2**63)


def join(plan: Plan) -> Ranks:
    """Meet the other ranks, where the plan has any.

    Raises:
        PerftrainError: there are none, or another number than planned.
    """
    if plan.ranks is None:
        return Ranks()
    if not dist.is_initialized():
        if plan.ranks > 1 and not under_torchrun():
            script = os.path.basename(sys.argv[0]) or "train.py"
            raise PerftrainError(
                f"{plan.ranks} processes must train together; this one was started alone. "
                f"Start the script with: torchrun --nproc-per-node={plan.ranks} {script}"
            )
        if under_torchrun():
            start_group(plan.device)
        else:
            start_group(plan.device, dist.HashStore(), rank=0, size=1)  # type: ignore[attr-defined]
        atexit.register(end_group)
    if dist.get_world_size() != plan.ranks:
        raise PerftrainError(
            f"The switches are set for {plan.ranks} ranks; {dist.get_world_size()} were started. Leave ranks out, or start "
            f"the script with: torchrun --nproc-per-node={plan.ranks} {os.path.basename(sys.argv[0]) or 'train.py'}"
        )
    if plan.device.type == "cuda":
        own_device(plan.device)
    for purpose in ("order", "losses"):  # all ranks must make the groups in the same order
        side_group(purpose)
    return Ranks(dist.get_rank(), dist.get_world_size())


def start_group(device: torch.device, store: Store | None = None, rank: int = -1, size: int = -1) -> None:
    """The process group: NCCL between CUDA devices, gloo for everything on the CPU. Without a store, as torchrun says."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, timeout=TIMEOUT, rank=rank, world_size=size)


def end_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def own_device(device: torch.device) -> None:
    """One CUDA device for each rank of a machine.

    Raises:
        PerftrainError: the program names the device of another rank.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
    if device.index not in (None, local_rank):
        raise PerftrainError(
            f"Rank {local_rank} of this machine trains on cuda:{local_rank}; the program asks for {device}. Give device='cuda'."
        )
    torch.cuda.set_device(local_rank)
