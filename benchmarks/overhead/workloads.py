"""The two programs that are trained, and the data they all read: batches made beforehand, held in memory.

Every arm reads its batches through the same plain ``torch.utils.data.DataLoader`` without workers and without batching
(the dataset's items *are* batches), so the data work is a list index and a pass through the DataLoader in all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

CLASSES = 10
DISTINCT_BATCHES = 16


@dataclass(frozen=True)
class Workload:
    """What to train, and how one process of the benchmark cuts it into timed slices."""

    name: str
    build: Callable[[], nn.Module]
    batch_shape: tuple[int, ...]
    fits: int
    """Trainings in one process; each builds model, optimizer and data anew."""
    slice_steps: int
    """Steps that an arm trains before the raw loop takes its turn for as many."""
    warm_slices: int
    """Slices at the start of each training that are not counted."""
    steps_share: float
    """Counted steps of one training, as a part of ``--steps``."""

    def slices(self, steps: int) -> int:
        """Slices of one training: warm-up, the counted ones, and a last one that is cut off because it ends in teardown."""
        return self.warm_slices + max(1, round(steps * self.steps_share / self.slice_steps)) + 1


@dataclass(frozen=True)
class Task:
    """One training, ready to go: an arm gets nothing else."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    loader: DataLoader[Any]
    steps: int
    """Length of the loader: one pass over it is the whole training."""


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


MLP = Workload("mlp", mlp, (32, 64), fits=2, slice_steps=50, warm_slices=2, steps_share=1.0)
CONVNET = Workload("convnet", convnet, (16, 3, 32, 32), fits=3, slice_steps=5, warm_slices=2, steps_share=0.1)
WORKLOADS = (MLP, CONVNET)


class Batches(Dataset[Any]):
    """``length`` batches in memory (a few distinct ones, over and over); ``at_border`` is called every ``slice_steps`` items."""

    def __init__(self, batches: list[Any], length: int, slice_steps: int, at_border: Callable[[], None]) -> None:
        self.batches, self.length, self.slice_steps, self.at_border = batches, length, slice_steps, at_border

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index >= self.length:  # plain iteration over a dataset ends with this
            raise IndexError(index)
        if index % self.slice_steps == 0:
            self.at_border()
        return self.batches[index % len(self.batches)]


def make_task(workload: Workload, steps: int, at_border: Callable[[], None] = lambda: None, as_dict: bool = False, seed: int = 0) -> Task:
    """The same seed gives the same initial parameters and the same batches.

    Args:
        at_border: called when the first batch of each slice is asked for.
        as_dict: batches are ``{"x": ..., "labels": ...}`` instead of ``(x, y)`` pairs.
    """
    torch.manual_seed(seed)
    model = workload.build()
    pairs = [(torch.randn(workload.batch_shape), torch.randint(CLASSES, workload.batch_shape[:1])) for _ in range(DISTINCT_BATCHES)]
    batches = [{"x": x, "labels": y} for x, y in pairs] if as_dict else pairs
    data = Batches(batches, steps, workload.slice_steps, at_border)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    return Task(model, optimizer, cross_entropy, DataLoader(data, batch_size=None), steps)
