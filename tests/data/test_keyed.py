from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from perftrain.data.keyed import Keyed
from perftrain.facts import PerftrainError


def draw(index: int) -> torch.Tensor:
    return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


class Noise(Dataset[torch.Tensor]):
    """Draws from all three generators."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return draw(index)


class Batched(Noise):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [draw(index) for index in indices]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def epochs(dataset: Dataset[Any], **options: Any) -> list[torch.Tensor]:
    # A sampler with a generator of its own: with persistent workers, the loader draws from the global one less often.
    sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type]
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, **options)
    return [batch for _ in range(2) for batch in loader]


@pytest.mark.parametrize("kind", [Noise, Batched])
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_give_the_same_samples_bit_for_bit(kind: type[Noise], persistent: bool) -> None:
    alone = epochs(Keyed(kind(), seed=3))
    workers = epochs(Keyed(kind(), seed=3), num_workers=2, persistent_workers=persistent)
    assert len(alone) == 6
    assert all(torch.equal(a, b) for a, b in zip(alone, workers, strict=True))
    assert not torch.equal(alone[0], alone[3])  # the epochs differ in order


def test_without_it_they_differ() -> None:
    alone, workers = epochs(Noise()), epochs(Noise(), num_workers=2)
    assert not torch.equal(alone[0], workers[0])


def test_spawned_workers_too() -> None:
    alone = epochs(Keyed(Noise(), seed=3))
    workers = epochs(Keyed(Noise(), seed=3), num_workers=1, persistent_workers=True, multiprocessing_context="spawn")
    assert all(torch.equal(a, b) for a, b in zip(alone, workers, strict=True))


@pytest.mark.parametrize("kind", [Noise, Batched])
def test_the_generators_outside_are_left_as_they_were(kind: type[Noise]) -> None:
    keyed = Keyed(kind(), seed=0)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = draw(0)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    keyed[5], keyed.__getitems__([1, 2])
    assert torch.equal(draw(0), expected)


def test_they_are_put_back_after_an_error() -> None:
    torch.manual_seed(1)
    expected = torch.rand(())
    torch.manual_seed(1)
    with pytest.raises(KeyError):
        Keyed({}, seed=0)["absent"]
    assert torch.equal(torch.rand(()), expected)


def test_samples_and_seeds_differ_and_copies_agree() -> None:
    keyed = Keyed(Noise(), seed=0)
    assert len(keyed) == 12
    assert not torch.equal(keyed[1][1:], keyed[2][1:])
    assert not torch.equal(keyed[1], Keyed(Noise(), seed=1)[1])
    assert torch.equal(keyed[1], keyed[np.int64(1)])
    assert torch.equal(keyed[1], pickle.loads(pickle.dumps(keyed))[1])


def test_an_iterable_dataset_is_refused() -> None:
    with pytest.raises(PerftrainError, match="Stream is iterable-style"):
        Keyed(Stream(), seed=0)
