"""Samplers that can go on in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import RandomSampler, SequentialSampler


class Resumable:
    """What ``sampler`` gives, in its own order, with ``state_dict`` and ``load_state_dict``.

    The state is the random generator as it was before the epoch's first draw, the epoch, and how many items were given since.
    Resuming draws the epoch again and skips what was given, so any sampler will do that draws from one generator: its own
    ``generator`` if it has one, else the process-wide one. That one is put back after the skip: its state belongs to the
    program's checkpoint. ``set_epoch``, for samplers that have it, counts on from the epoch that was resumed.

    Args:
        sampler: of samples or of whole batches.
        generator: what ``sampler`` draws from, where it does not say so itself.
    """

    def __init__(self, sampler: Any, generator: torch.Generator | None = None) -> None:
        self.sampler = sampler
        self.generator = getattr(sampler, "generator", None) or generator
        self._before: torch.Tensor | None = None
        self._given = 0
        self._resume: dict[str, Any] | None = None
        self._epoch: int | None = None
        self._told = self._ahead = 0

    def __len__(self) -> int:
        return len(self.sampler)

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":  # not built yet (pickle)
            raise AttributeError(name)
        inner = self.sampler if hasattr(self.sampler, name) else getattr(self.sampler, "sampler", self.sampler)
        found = getattr(inner, name)
        return partial(self._set_epoch, found) if name == "set_epoch" else found

    def __iter__(self) -> Iterator[Any]:
        resume, self._resume = self._resume, None
        again: int = resume["given"] if resume else 0
        now = self._random()
        if resume and again:
            self._set_random(resume["before"])
        self._before, self._given = self._random(), again
        items = iter(self.sampler)
        for _ in range(again):
            next(items, None)
        if again and self.generator is None:
            self._set_random(now)
        for item in items:
            self._given += 1
            yield item

    def state_dict(self) -> dict[str, Any]:
        return dict(self._resume or {"before": self._before, "given": self._given, "epoch": self._epoch})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resume = dict(state)
        if state["epoch"] is not None:
            self.set_epoch(self._told)

    def _set_epoch(self, inner: Callable[[int], None], epoch: int) -> None:
        self._told = epoch
        if self._resume is not None and self._resume["epoch"] is not None:
            self._ahead = self._resume["epoch"] - epoch
        now = epoch + self._ahead
        self._epoch = now
        inner(now)

    def _random(self) -> torch.Tensor:
        return torch.get_rng_state() if self.generator is None else self.generator.get_state()

    def _set_random(self, state: torch.Tensor) -> None:
        if self.generator is None:
            torch.set_rng_state(state)
        else:
            self.generator.set_state(state)


def sampler_of(dataset: Any, shuffle: bool | None, sampler: Any, generator: torch.Generator | None) -> Any:
    """The sampler that ``DataLoader`` would use."""
    if sampler is not None:
        return sampler
    return RandomSampler(dataset, generator=generator) if shuffle else SequentialSampler(dataset)
