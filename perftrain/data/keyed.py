"""Random samples that do not depend on who reads them, nor when."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from perftrain.facts import PerftrainError


class Keyed(Dataset[Any]):
    """A map-style dataset whose randomness in ``[index]`` depends on ``(seed, index)`` alone.

    Augmentations draw from process-wide generators (``random``, ``numpy.random``, torch on the CPU). Worker processes have
    generators of their own, so the same seed gives other samples as soon as loading moves into workers. Here the three
    generators are seeded for each sample and put back afterwards: samples are equal bit for bit with any number of workers,
    and drawing them leaves the generators of the model (dropout) untouched.

    The epoch is left out of the key on purpose: a sample looks the same at each visit. That costs augmentation, which a
    comparison of the first losses does not need, and it leaves nothing to count, to share, or to set before each epoch:
    there is no state that workers could disagree about. It is for comparing runs, not for training a model to keep.

    Randomness that the dataset keeps to itself (a generator among its attributes) is out of reach, and so is the order of
    the samples: two loaders visit in one order if their samplers draw from equal generators of their own. Without one, a
    loader with ``persistent_workers`` visits in another order than one without from the second epoch on.

    Args:
        dataset: with ``__getitem__``; its ``__getitems__``, if it has one, is keyed by all its indices together.
        seed: any whole number.

    Raises:
        PerftrainError: an iterable-style dataset, which has no index to key on.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise PerftrainError(
                f"Only a dataset with an index can be keyed: {type(dataset).__name__} is iterable-style. Give it __getitem__."
            )
        self.dataset = dataset
        self.seed = seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        with _generators_seeded(f"{self.seed}/{index}"):
            return self.dataset[index]

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        whole_batch = getattr(self.dataset, "__getitems__", None)
        if not callable(whole_batch):
            return [self[index] for index in indices]
        with _generators_seeded(f"{self.seed}/{'/'.join(map(str, indices))}"):
            return whole_batch(indices)


_ONE_AT_A_TIME = threading.RLock()
"""The generators belong to the process: loader threads would seed them under each other's hands."""


@contextmanager
def _generators_seeded(key: str) -> Iterator[None]:
    """Seed ``random``, ``numpy.random`` and torch's CPU generator from ``key``; put their states back afterwards."""
    # hash() differs between processes; a digest does not.
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "big")
    # torch.manual_seed would seed the GPUs too, in the middle of a training that draws from them.
    with _ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
        python_state, numpy_state = random.getstate(), np.random.get_state()
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
