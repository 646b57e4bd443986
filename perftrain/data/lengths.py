"""How long the samples of a dataset are, how much of a batch is padding, and batches of samples that are about as long."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler, Subset, default_collate

from perftrain.data.keyed import Keyed


def lengths_of(dataset: Any) -> Sequence[int] | None:
    """The length of every sample, where it costs nothing to know: a ``lengths`` attribute, or a list of samples in memory."""
    if isinstance(dataset, Keyed):
        return lengths_of(dataset.dataset)
    if isinstance(dataset, Subset):
        inner = lengths_of(dataset.dataset)
        return None if inner is None else [inner[index] for index in dataset.indices]
    if isinstance(dataset, (list, tuple)):
        found = [_length(sample) for sample in dataset]
        return [length for length in found if length is not None] if None not in found else None
    lengths = getattr(dataset, "lengths", None)
    return lengths if lengths is not None and len(lengths) == len(dataset) else None


def _length(sample: Any) -> int | None:
    """Of the first sequence in a sample."""
    if isinstance(sample, dict):
        sample = tuple(sample.values())
    for part in sample if isinstance(sample, tuple) else (sample,):
        if isinstance(part, (torch.Tensor, np.ndarray)) and part.ndim:
            return int(part.shape[0])
        if isinstance(part, list):
            return len(part)
    return None


def padding_share(loader: Any) -> float | None:
    """The part (0..1) of this loader's batches that is padding to their longest sample; None where nothing says it.

    Of a random order, not of the loader's own, from which nothing is drawn.
    """
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        return None
    if loader.collate_fn is default_collate:  # it stacks, so all samples are of one size
        return 0.0
    lengths = lengths_of(loader.dataset)
    if lengths is None or not len(lengths):
        return None
    order = np.random.default_rng(0).permutation(np.asarray(lengths))
    batches = [order[at : at + loader.batch_size] for at in range(0, len(order), loader.batch_size)]
    return 1 - float(order.sum()) / max(1, sum(int(batch.max()) * len(batch) for batch in batches))


class LengthBuckets(Sampler[list[int]]):
    """Batches of samples that are about as long, from a sampler's own order: every sample once per epoch.

    ``window`` batches' worth of the order is sorted by length and cut into batches; the batches of a window come in random
    order. What ``drop_last`` leaves out are the last samples of the sampler's order, as without buckets.

    Args:
        sampler: decides the order (and, as a distributed one does, which samples there are).
        lengths: of every sample that it may name.
        window: batches that are sorted together.
        shuffle: the batches of a window; else they come shortest first.
        generator: what a DataLoader's shuffle draws its seed from; None: torch's global one.
    """

    def __init__(
        self,
        sampler: Any,
        lengths: Sequence[int],
        batch_size: int,
        window: int,
        drop_last: bool = False,
        shuffle: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        self.sampler, self.lengths, self.batch_size, self.window = sampler, lengths, batch_size, window
        self.drop_last, self.shuffle, self.generator = drop_last, shuffle, generator

    def __len__(self) -> int:
        samples = len(self.sampler)
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Pass it on to a sampler that wants to know."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=self.generator).item()) if self.shuffle else 0
        rng = np.random.default_rng(seed)
        held: list[int] = []
        for index in self.sampler:
            held.append(index)
            if len(held) == self.window * self.batch_size:
                yield from self._batches(held, rng)
                held = []
        if self.drop_last:
            del held[len(held) // self.batch_size * self.batch_size :]
        yield from self._batches(held, rng)

    def _batches(self, held: list[int], rng: np.random.Generator) -> list[list[int]]:
        by_length = sorted(held, key=lambda index: self.lengths[index])
        batches = [by_length[at : at + self.batch_size] for at in range(0, len(by_length), self.batch_size)]
        return [batches[number] for number in rng.permutation(len(batches))] if self.shuffle else batches
