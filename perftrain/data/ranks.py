"""Several processes (ranks) that train together: how many there are, and the part of every batch that each of them gets."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, RandomSampler, Sampler, SequentialSampler

from perftrain.facts import PerftrainError

BATCHES_AT_ONCE = 1024
"""Batches whose indices rank 0 tells the others in one message."""


# --- how many ---
def ranks_for(wanted: int | None, device: torch.device) -> int:
    """The number of ranks: as asked, or what runs already, or what torchrun started, or one a CUDA device, on the CPU 2."""
    if wanted is not None:
        return wanted
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    if under_torchrun():
        return int(os.environ["WORLD_SIZE"])
    return torch.cuda.device_count() if device.type == "cuda" else 2


def under_torchrun() -> bool:
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def check_ranks(switch: str, ranks: int | None) -> None:
    """Refuse a number of ranks that is no number of processes."""
    if ranks is not None and ranks < 1:
        raise PerftrainError(f"{switch}.ranks is 1 or more, or null (one a device); it was {ranks}. Try opt.{switch}.ranks=2.")


def why_no_ranks(switch: str, wanted: int | None, device: torch.device) -> str:
    """Why so many processes cannot train together here, or an empty string."""
    if not dist.is_available():
        return "this build of torch has no torch.distributed; pip install torch from pytorch.org."
    backend, found = ("NCCL", dist.is_nccl_available()) if device.type == "cuda" else ("gloo", dist.is_gloo_available())
    if not found:
        return f"this build of torch has no {backend}, over which ranks talk on {device.type}."
    if device.type != "cuda" or under_torchrun():
        return ""
    ranks, devices = ranks_for(wanted, device), torch.cuda.device_count()
    if ranks > devices:
        return f"{ranks} ranks need a CUDA device each; there are {devices}. Try opt.{switch}.ranks={devices}."
    if wanted is None and devices == 1:
        return f"there is one CUDA device, nobody to share with (opt.{switch}.ranks=1 shows what the wrapper alone costs)."
    return ""


def say_ranks(ranks: int, device: torch.device) -> str:
    """For the notes of a verdict."""
    if device.type == "cuda":
        return f"{ranks} ranks over NCCL, a device each; memory is that of the fullest device"
    return f"{ranks} ranks over gloo, which share the threads of one process; memory is that of all ranks together"


def part_normalized(model: nn.Module) -> list[str]:
    """A note about layers that look at a rank's part of the batch only."""
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        return ["batch normalization sees one rank's part of a batch: the training is not quite that of one process"]
    return []


@lru_cache(maxsize=8)
def _side_group(world: Any, purpose: str) -> Any:
    return dist.new_group(backend="gloo")


def side_group(purpose: str) -> Any:
    """A group for small messages, apart from the gradients: they may come from other threads (prefetching) at any time."""
    return _side_group(dist.group.WORLD, purpose)


# --- which samples ---
def shared_out(options: Any, switch: str) -> Any:
    """Loader options (as in :class:`perftrain.opt.seams.LoaderOptions`) under which this rank loads its part of the same batches.

    Raises:
        PerftrainError: batches that cannot be shared equally: then the mean over ranks would not be the mean over samples.
    """
    dataset = options.dataset
    if dataset is None:
        raise PerftrainError(
            f"The switch {switch!r} shares out the batches of a torch.utils.data.DataLoader; this program has another loader, or another "
            f"switch put one in its place. Give a DataLoader, or leave one of the switches out."
        )
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise PerftrainError(
            f"The switch {switch!r} shares batches out by index; a {type(dataset).__name__} has none. "
            f"Give a dataset with __getitem__ and __len__, or leave the switch out."
        )
    if isinstance(options.sampler, DistributedSampler):
        raise PerftrainError(f"The switch {switch!r} shares every batch out itself. Take the DistributedSampler out of the loader.")
    if options.batch_sampler is None and options.batch_size is None:
        raise PerftrainError(f"The switch {switch!r} shares batches out; the loader has batch_size=None. Give it a batch_size.")
    batches = options.batch_sampler or _batches(options, switch, dist.get_world_size())
    shared = SharedBatches(batches, switch)
    return replace(options, batch_sampler=shared, batch_size=1, shuffle=None, sampler=None, drop_last=False)


def _batches(options: Any, switch: str, ranks: int) -> BatchSampler:
    """What ``DataLoader`` would make of the options; checked while the user can still be told what to type."""
    size = options.batch_size
    if size % ranks:
        raise PerftrainError(
            f"The switch {switch!r} shares each batch equally among {ranks} ranks; batch_size={size} cannot be divided. "
            f"Try a batch_size of {-(-size // ranks) * ranks}, or opt.{switch}.ranks={_largest_divisor(size, ranks)}."
        )
    sampler = options.sampler
    if sampler is None:
        sampler = RandomSampler(options.dataset, generator=options.generator) if options.shuffle else SequentialSampler(options.dataset)
    last = len(sampler) % size if hasattr(sampler, "__len__") else 0
    if last % ranks and not options.drop_last:
        raise PerftrainError(
            f"The switch {switch!r} shares each batch equally among {ranks} ranks; the last batch of an epoch has {last} samples. "
            f"Give the DataLoader drop_last=True."
        )
    return BatchSampler(sampler, size, options.drop_last)


def _largest_divisor(size: int, at_most: int) -> int:
    return next(n for n in range(at_most, 0, -1) if size % n == 0)


class SharedBatches(Sampler[list[Any]]):
    """Every batch of ``batches``, cut down to this rank's samples (every n-th).

    Rank 0 alone draws the order and tells the others: whatever else draws random numbers on a rank (augmentation, dropout), and
    whatever the sampler is, all ranks have parts of the same batches, each sample is in one part, and the order is the one
    that a single process would have.
    """

    def __init__(self, batches: Iterable[list[Any]], switch: str) -> None:
        self.batches = batches
        self.switch = switch
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.group = side_group("order")

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        for part in (self.batches, getattr(self.batches, "sampler", None)):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)  # type: ignore[union-attr]

    def __iter__(self) -> Iterator[list[Any]]:
        batches = iter(self.batches) if self.rank == 0 else iter(())
        chunk: list[list[Any]] = []
        while True:
            told = [list(map(list, islice(batches, BATCHES_AT_ONCE)))]
            dist.broadcast_object_list(told, src=0, group=self.group)
            chunk = told[0]
            for batch in chunk:
                if len(batch) % self.ranks:
                    raise PerftrainError(
                        f"The switch {self.switch!r} shares each batch equally among {self.ranks} ranks; one has {len(batch)} samples. "
                        f"Give a batch sampler whose batches can be divided, or leave the switch out."
                    )
                yield batch[self.rank :: self.ranks]
            if len(chunk) < BATCHES_AT_ONCE:
                return


# --- micro-batches ---
def exchanging_last(
    forward: Callable[[Any], Any], micro_batches: int, exchange: Callable[[bool], None], first_step_too: bool = False
) -> Callable[[Any], Any]:
    """``forward`` for micro-batches: gradients are exchanged after the last one of each step only.

    ``exchange(on)`` tells the wrapper around the model whether the backward pass of the coming forward pass exchanges them.
    ``first_step_too``: after every micro-batch of the first step, which comes to the same (a mean of means is the mean).
    """
    done = 0

    def call(batch: Any) -> Any:
        nonlocal done
        done += 1
        exchange(done % micro_batches == 0 or (first_step_too and done < micro_batches))
        return forward(batch)

    return call
