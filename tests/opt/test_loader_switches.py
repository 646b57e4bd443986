"""Switches of the loader: every sample once an epoch, in a known order, resumable; and what each knob observably does."""

from __future__ import annotations

import gc
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    WeightedRandomSampler,
)

from perftrain import PerftrainError, Trainer, opt
from perftrain.data.keyed import Keyed
from perftrain.data.move import mapped
from perftrain.data.resume import Resumable
from perftrain.engine.assemble import build_loader, others_fit
from perftrain.engine.checks import NotAvailable, check_switches
from perftrain.engine.trainer import facts_of
from perftrain.opt.base import Switch
from perftrain.opt.device_prefetch import OneAhead
from perftrain.opt.seams import LoaderOptions, Plan, Workload

CPU, CUDA = Plan(), Plan(device=torch.device("cuda"))
Maker = Callable[[], list[Switch]]
PERSISTENT: Maker = lambda: [opt.PersistentWorkers(), opt.Workers(num_workers=2)]  # noqa: E731
ENGINES: dict[str, Maker] = {
    "workers": lambda: [opt.Workers(num_workers=2)],
    "prefetch": lambda: [opt.Prefetch(factor=3), opt.Workers(num_workers=2)],
    "stateful": lambda: [opt.StatefulLoader()],
    "stateful+workers": lambda: [opt.StatefulLoader(), opt.Workers(num_workers=2)],
    "nodes": lambda: [opt.Nodes(threads=1)],
    "nodes+threads": lambda: [opt.Nodes(threads=3, ahead=1)],
}


class Numbers(Dataset[Any]):
    """Sample i is i."""

    def __init__(self, count: int = 23) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return index


def delivered(*switches: Switch, loader: DataLoader[Any] | None = None, steps: int = 12, seed: int = 5) -> list[list[int]]:
    """The samples of each batch that the model is trained on."""
    made, seen = numbers_trainer(*switches, loader=loader)
    torch.manual_seed(seed)
    made.fit(steps=steps)
    return seen


def numbers_trainer(*switches: Switch, loader: DataLoader[Any] | None = None) -> tuple[Trainer, list[list[int]]]:
    seen: list[list[int]] = []

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append(batch.tolist())
        return model(torch.ones(1, 1)).sum()

    model = nn.Linear(1, 1)
    loader = shuffled() if loader is None else loader
    return Trainer(model, None, torch.optim.SGD(model.parameters(), lr=0.1), loader, opt=switches, step=step), seen


def shuffled(**rest: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(), **{"batch_size": 4, "shuffle": True, **rest})


# --- exact about samples ---
LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": shuffled,
    "in order": lambda: shuffled(shuffle=False),
    "full batches": lambda: shuffled(drop_last=True),
    "own generator": lambda: shuffled(generator=torch.Generator().manual_seed(3)),
    "weighted": lambda: shuffled(shuffle=None, sampler=WeightedRandomSampler([1.0] * 23, 23)),
    "sharded": lambda: shuffled(shuffle=None, sampler=DistributedSampler(Numbers(), num_replicas=2, rank=1, seed=1)),
    "own batches": lambda: DataLoader(Numbers(), batch_sampler=BatchSampler(SequentialSampler(range(23)), 5, False)),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", LOADERS)
def test_the_same_batches_in_the_same_order(engine: str, kind: str) -> None:
    """Over two epochs, bit for bit what the plain DataLoader gives: so each sample once an epoch, by seed."""
    make = LOADERS[kind]
    plain = delivered(loader=make())
    assert delivered(*ENGINES[engine](), loader=make()) == plain
    if kind == "shuffled":
        assert delivered(seed=6) != plain
        assert sorted(itertools.chain(*plain[:6])) == list(range(23))
        assert plain[6:] != plain[:6]
    if kind == "full batches":
        assert {len(batch) for batch in plain} == {4}


@pytest.mark.parametrize("engine", [*ENGINES, "persistent", "in_order"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_every_sample_once_an_epoch(engine: str, drop_last: bool) -> None:
    switches = {**ENGINES, "persistent": PERSISTENT, "in_order": lambda: [opt.InOrder(), opt.Workers(num_workers=2)]}[engine]()
    made, _ = numbers_trainer(*switches, loader=shuffled(drop_last=drop_last))
    size = 5 if drop_last else 6
    assert made.run.batches_per_epoch == size
    found = delivered(*switches, loader=shuffled(drop_last=drop_last), steps=3 * size)
    for epoch in range(3):
        samples = list(itertools.chain(*found[epoch * size : (epoch + 1) * size]))
        assert len(samples) == len(set(samples)) == (20 if drop_last else 23)


@pytest.mark.parametrize("engine", ENGINES)
def test_shards_are_disjoint_and_shuffled_anew(engine: str) -> None:
    def shard(rank: int) -> list[list[int]]:
        sampler = DistributedSampler(Numbers(24), num_replicas=2, rank=rank, shuffle=True, seed=1)
        return delivered(*ENGINES[engine](), loader=DataLoader(Numbers(24), batch_size=4, sampler=sampler), steps=6)

    first, second = shard(0), shard(1)
    epochs = [sorted(itertools.chain(*first[part], *second[part])) for part in (slice(0, 3), slice(3, 6))]
    assert epochs == [list(range(24))] * 2
    assert first[:3] != first[3:]


def test_a_dataset_that_reads_batches_and_samples_without_batches() -> None:
    class Batched(Numbers):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [100 + i for i in indices]

    for make in ENGINES.values():
        assert delivered(*make(), loader=DataLoader(Batched(), batch_size=4), steps=1) == [[100, 101, 102, 103]]
        alone = DataLoader(Numbers(), batch_size=None, collate_fn=torch.tensor)
        assert delivered(*make(), loader=alone, steps=25) == [*range(23), 0, 1]


# --- resuming ---
RESUMABLE = ["stateful", "stateful+workers", "nodes", "nodes+threads"]


@pytest.mark.parametrize("engine", RESUMABLE)
@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("at", [2, 5, 6])
def test_an_epoch_goes_on_where_it_stopped(engine: str, kind: str, at: int, tmp_path: Path) -> None:
    """In a new trainer whose random state is another; ``at`` 5, 6: at the end of an epoch, or next to it."""
    made, seen = numbers_trainer(*ENGINES[engine](), loader=LOADERS[kind]())
    per_epoch = len(made.loader)  # type: ignore[arg-type]
    torch.manual_seed(5)
    made.fit(steps=at)
    torch.save(made.loader.state_dict(), tmp_path / "state")  # type: ignore[attr-defined]
    made.fit(steps=12 - at)
    again, rest = numbers_trainer(*ENGINES[engine](), loader=LOADERS[kind]())
    torch.manual_seed(77)
    state = torch.load(tmp_path / "state", weights_only=True)
    again.loader.load_state_dict(state)  # type: ignore[attr-defined]
    left = (per_epoch - at) % per_epoch
    again.fit(steps=left + per_epoch)
    assert rest[:left] == seen[at : at + left]
    if kind in ("shuffled", "full batches"):  # the next shuffle draws from the process-wide generator, which is another now
        following = list(itertools.chain(*rest[left:]))
        assert len(set(following)) == len(following) >= 20
    elif kind != "weighted":
        both = min(len(rest), len(seen) - at)
        assert rest[:both] == seen[at : at + both]


@pytest.mark.parametrize("engine", RESUMABLE)
def test_resuming_leaves_the_random_state_alone(engine: str) -> None:
    made, _ = numbers_trainer(*ENGINES[engine]())
    made.fit(steps=2)
    state = made.loader.state_dict()  # type: ignore[attr-defined]
    again, _ = numbers_trainer(*ENGINES[engine]())
    again.loader.load_state_dict(state)  # type: ignore[attr-defined]
    torch.manual_seed(1)
    plain = iter(shuffled())  # draws one number for its workers when it is made
    expected = torch.get_rng_state()
    del plain
    torch.manual_seed(1)
    again.fit(steps=1)
    assert torch.equal(torch.get_rng_state(), expected)


def test_fewer_states_resume_as_well() -> None:
    made, seen = numbers_trainer(opt.StatefulLoader(every_steps=4))
    made.fit(steps=3)
    state = made.loader.state_dict()  # type: ignore[attr-defined]
    made.fit(steps=3)
    again, rest = numbers_trainer(opt.StatefulLoader(every_steps=4))
    again.loader.load_state_dict(state)  # type: ignore[attr-defined]
    again.fit(steps=3)
    assert rest == seen[3:]


def test_a_sampler_resumes_by_itself() -> None:
    for generator in (None, torch.Generator().manual_seed(2)):
        sampler = Resumable(torch.utils.data.RandomSampler(range(10), generator=generator))
        items = iter(sampler)
        first = [next(items) for _ in range(4)]
        state = sampler.state_dict()
        rest = list(items)
        assert sorted(first + rest) == list(range(10))
        sampler.load_state_dict(state)
        assert sampler.state_dict() == state
        assert list(sampler) == rest
        assert len(list(sampler)) == len(sampler) == 10


# --- workers only ---
NEED_WORKERS = {"persistent_workers": opt.PersistentWorkers, "prefetch": opt.Prefetch, "in_order": opt.InOrder}


@pytest.mark.parametrize("name", NEED_WORKERS)
def test_alone_without_workers_it_says_what_to_type(name: str) -> None:
    switch = NEED_WORKERS[name]()
    with pytest.raises(PerftrainError, match=rf"{name} needs worker processes.*\+opt=\[workers,{name}\]"):
        numbers_trainer(switch)
    made, _ = numbers_trainer()
    assert f"+opt=[workers,{name}]" in switch.unfit(facts_of(made.workload))
    workers, _ = numbers_trainer(loader=shuffled(num_workers=1))
    assert switch.unfit(facts_of(workers.workload)) == ""
    assert delivered(switch, loader=shuffled(num_workers=1, shuffle=False), steps=2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    delivered(loader=shuffled(in_order=False), steps=1)  # the user's own affair


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_in_any_order_on_the_command_line(order: tuple[int, ...]) -> None:
    switches = [opt.PersistentWorkers(), opt.Workers(num_workers=2), opt.Prefetch(factor=5)]
    made, _ = numbers_trainer(*(switches[i] for i in order))
    loader: Any = made.loader
    assert (loader.persistent_workers, loader.num_workers, loader.prefetch_factor) == (True, 2, 5)
    assert made.run.in_flight == 10


class Where(Numbers):
    """Sample i is the process that reads it."""

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def test_persistent_workers_live_on() -> None:
    def processes(*switches: Switch) -> tuple[set[int], set[int]]:
        found = delivered(*switches, loader=DataLoader(Where(8), batch_size=1), steps=16)
        pids = [pid for (pid,) in found]
        return set(pids[:8]), set(pids[8:])

    first, second = processes(opt.Workers(num_workers=2))
    assert not first & second
    first, second = processes(*PERSISTENT())
    assert first == second
    assert len(first) == 2
    assert os.getpid() not in first


class Asked(Numbers):
    """Counts what was read, in memory that workers share."""

    def __init__(self) -> None:
        super().__init__(64)
        self.reads = torch.zeros(64).share_memory_()

    def __getitem__(self, index: int) -> int:
        self.reads[index] += 1
        return index


def test_prefetch_makes_so_many_batches_ahead() -> None:
    def ahead(factor: int) -> int:
        data = Asked()
        made, _ = numbers_trainer(opt.Workers(num_workers=1), opt.Prefetch(factor=factor), loader=DataLoader(data, batch_size=1))
        batches = iter(made.loader)
        next(batches)
        before, most = -1, 0
        while most > before or most < 2:  # until nothing more comes
            before = most
            time.sleep(0.3)
            most = int(data.reads.sum())
        return most

    assert [ahead(2), ahead(6)] == [3, 7]


class Slow(Numbers):
    """Sample 0 takes long."""

    def __getitem__(self, index: int) -> int:
        if index == 0:
            time.sleep(0.7)
        return index


def test_a_slow_batch_does_not_hold_back_the_others() -> None:
    def first(*switches: Switch) -> list[int]:
        return delivered(opt.Workers(num_workers=2), *switches, loader=DataLoader(Slow(), batch_size=1), steps=1)[0]

    assert first() == [0]
    assert first(opt.InOrder()) != [0]


# --- nodes ---
class Threaded(Numbers):
    """Notes which threads read, takes its time."""

    def __init__(self, count: int = 400, pause_s: float = 0.0) -> None:
        super().__init__(count)
        self.pause_s, self.by = pause_s, list[int]()

    def __getitem__(self, index: int) -> int:
        self.by.append(threading.get_ident())
        time.sleep(self.pause_s)
        return index


def test_nodes_read_in_threads_of_this_process() -> None:
    data = Threaded(60, pause_s=0.002)
    delivered(opt.Nodes(threads=3), loader=DataLoader(data, batch_size=4), steps=15)
    assert len(data.by) == 60
    assert len(set(data.by)) == 3
    assert threading.get_ident() not in data.by


def test_nodes_rest_while_they_are_off() -> None:
    data = Threaded(pause_s=0.005)
    made, seen = numbers_trainer(opt.Nodes(threads=2, ahead=8), loader=DataLoader(data, batch_size=4))
    before = torch.get_num_threads()
    made.fit(steps=2)
    at_end = len(data.by)
    time.sleep(0.3)
    assert len(data.by) == at_end < 4 * 18
    started_later: list[int] = []
    thread = threading.Thread(target=lambda: started_later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert [torch.get_num_threads(), *started_later] == [before, before]
    made.fit(steps=20)
    assert list(itertools.chain(*seen)) == list(range(88))
    assert len(data.by) > at_end


def test_nodes_end_with_their_loader() -> None:
    before = set(threading.enumerate())
    gc.disable()  # a collection that falls into one of torchdata's own threads makes it join itself, which is an error there
    try:
        made, _ = numbers_trainer(opt.Nodes(threads=2), loader=DataLoader(Threaded(), batch_size=4))
        made.fit(steps=2)
        assert len(set(threading.enumerate()) - before) >= 2
        made.run.batches.close()  # type: ignore[attr-defined]
        del made
        gc.collect()
    finally:
        gc.enable()
    deadline = time.monotonic() + 10
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not set(threading.enumerate()) - before


class Broken(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 9:
            raise RuntimeError("sample 9 is broken")
        return index


@pytest.mark.parametrize("engine", ["stateful", "nodes", "nodes+threads"])
def test_an_error_of_the_dataset_arrives_with_its_words(engine: str) -> None:
    made, seen = numbers_trainer(*ENGINES[engine](), loader=DataLoader(Broken(), batch_size=4))
    with pytest.raises(RuntimeError, match="sample 9 is broken"):
        made.fit(steps=12)
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7]]


class Noise(Numbers):
    """Random samples, from three generators."""

    def __getitem__(self, index: int) -> Tensor:  # type: ignore[override]
        first = torch.rand(())
        time.sleep(0.0005)
        return torch.stack([first, torch.tensor(random.random()), torch.rand(())])


def test_keyed_samples_are_the_same_in_threads() -> None:
    loader = DataLoader(Keyed(Noise(), 3), batch_size=4)
    expected = torch.cat(list(loader))
    made, _ = build_loader(loader, [opt.Nodes(threads=3)])
    before = torch.get_rng_state()
    for _ in range(3):
        assert torch.equal(torch.cat(list(made)), expected)
    drawn = torch.empty((), dtype=torch.int64)
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    for _ in range(3):
        drawn.random_()
    assert torch.equal(torch.get_rng_state(), after)  # one number an epoch, as DataLoader draws


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(6)


def test_streams() -> None:
    with pytest.raises(PerftrainError, match="Stream is a stream"):
        numbers_trainer(opt.Nodes(), loader=DataLoader(Stream(), batch_size=2))
    assert delivered(opt.StatefulLoader(), loader=DataLoader(Stream(), batch_size=2), steps=4) == [[0, 1], [2, 3], [4, 5], [0, 1]]


def test_a_loader_that_is_no_dataloader_is_left_alone() -> None:
    batches: Any = [torch.tensor([1, 2])]
    for switch in (opt.Nodes(), opt.StatefulLoader(), opt.Prefetch(), opt.PinMemory(), opt.BatchSize(size=2)):
        with pytest.raises(PerftrainError):
            build_loader(batches, [switch])


@pytest.mark.parametrize("other", [opt.Workers, opt.PersistentWorkers, opt.Prefetch, opt.InOrder, opt.StatefulLoader])
def test_nodes_exclude_worker_processes(other: Any) -> None:
    with pytest.raises(PerftrainError, match="exclude each other"):
        numbers_trainer(opt.Nodes(), other())


def test_one_thread_only_is_the_same_training() -> None:
    for switches in ([opt.Nodes(threads=2)], [opt.StatefulLoader()], [opt.Workers(num_workers=1), opt.Prefetch()]):
        assert image_losses(*switches) == image_losses()


def image_losses(*switches: Switch) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(24, 8, generator=generator), torch.randint(0, 4, (24,), generator=generator))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    made = Trainer(
        model, cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=8, shuffle=True), opt=switches
    )
    torch.manual_seed(5)
    made.fit(steps=8)
    return made.meter.losses()["loss"]


# --- batch_size ---
def test_batches_of_the_size_that_was_asked_for() -> None:
    assert [len(batch) for batch in delivered(opt.BatchSize(size=7), steps=5)] == [7, 7, 7, 2, 7]
    made, _ = numbers_trainer(opt.BatchSize(size=7))
    made.fit(steps=2)
    assert made.record.breakdown.samples == 7 * made.record.breakdown.steps
    for switches in ([opt.Nodes(), opt.BatchSize(size=6)], [opt.StatefulLoader(), opt.BatchSize(size=6)]):
        assert [len(batch) for batch in delivered(*switches, steps=4)] == [6, 6, 6, 5]


def test_without_a_size_a_cpu_is_refused_with_what_to_type() -> None:
    with pytest.raises(NotAvailable, match=r"no hard edge.*opt\.batch_size\.size=64"):
        numbers_trainer(opt.BatchSize())
    assert opt.BatchSize().unavailable(CUDA) == ""


def test_what_batch_size_cannot_set() -> None:
    with pytest.raises(PerftrainError, match="batches from its own sampler"):
        numbers_trainer(opt.BatchSize(size=2), loader=LOADERS["own batches"]())
    with pytest.raises(PerftrainError, match=r"it has 23 and batch_size\.size=24 with drop_last.*size=23"):
        numbers_trainer(opt.BatchSize(size=24), loader=shuffled(drop_last=True))
    options = LoaderOptions(Numbers(), batch_size=4, device=torch.device("cuda"))
    with pytest.raises(PerftrainError, match="Nobody can try"):
        opt.BatchSize().loader(options)


class Hungry(nn.Module):
    """Out of memory from 41 samples on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.tried = nn.Linear(8, 4), list[int]()

    def forward(self, x: Tensor) -> Tensor:
        SIZES.append(len(x))
        if len(x) > 40:
            raise torch.OutOfMemoryError("CUDA out of memory (pretended)")
        return self.linear(x)


SIZES: list[int] = []


@pytest.mark.parametrize(("limit", "found"), [(None, 32), (17, 16), (5, 5), (1000, 32)])
def test_the_largest_size_that_fits_is_found_by_trying(limit: int | None, found: int) -> None:
    """The memory's edge is pretended; copying the program, training it with the other switches and putting back are real."""
    data = torch.utils.data.TensorDataset(torch.randn(300, 8), torch.randint(0, 4, (300,)))
    model = Hungry()
    optimizer = torch.optim.AdamW(model.parameters())
    size = 5 if found == 5 else 8
    workload = Workload(model, optimizer, DataLoader(data, batch_size=size, shuffle=True), cross_entropy)
    switch, others = opt.BatchSize(limit=limit), [opt.GC(), opt.AMP()]
    weights, random_state = model.linear.weight.clone(), torch.get_rng_state()
    SIZES.clear()
    fits = others_fit(workload, [switch, *others], CPU.device, None)
    options = LoaderOptions(data, batch_size=size, device=torch.device("cuda"), fits=fits)
    assert switch.loader(options).batch_size == found
    expected = {(None, 32): [16, 16, 32, 32, 64], (17, 16): [16, 16], (5, 5): [], (1000, 32): [16, 16, 32, 32, 64]}
    assert expected[limit, found] == SIZES
    assert torch.equal(model.linear.weight, weights)
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), random_state)


# --- for CUDA ---
def test_switches_for_cuda_are_refused_on_a_cpu() -> None:
    for switch, says in ((opt.PinMemory(), "copies to CUDA"), (opt.DevicePrefetch(), "nothing to copy")):
        with pytest.raises(NotAvailable, match=says):
            check_switches([switch], CPU)
        assert switch.unavailable(CUDA) == ""
    assert opt.PinMemory().loader(LoaderOptions(Numbers())).pin_memory


def ahead_of(loader: Any, log: list[tuple[str, Any]]) -> OneAhead:
    def start(batch: Any) -> Any:
        log.append(("start", batch))
        return batch

    def finish(batch: Any) -> Any:
        log.append(("finish", batch))
        return batch

    return OneAhead(loader, start, finish)


def test_the_next_batch_is_started_before_this_one_is_given() -> None:
    log: list[tuple[str, Any]] = []
    loader = ahead_of([1, 2, 3], log)
    assert list(loader) == [1, 2, 3]
    order = [("start", 1), ("start", 2), ("finish", 1), ("start", 3), ("finish", 2), ("finish", 3)]
    assert log == order
    assert list(loader) == [1, 2, 3]
    assert len(loader) == 3
    assert list(ahead_of([], log)) == []
    assert not hasattr(loader, "state_dict")


@pytest.mark.parametrize("engine", RESUMABLE)
def test_a_loader_that_reads_ahead_resumes_with_the_batch_it_has_not_given(engine: str) -> None:
    torch.manual_seed(5)
    inner, _ = build_loader(shuffled(), ENGINES[engine]())
    loader = ahead_of(inner, [])
    batches = iter(loader)
    given = [next(batches).tolist() for _ in range(2)]
    state = loader.state_dict()
    rest = [batch.tolist() for batch in batches]
    assert sorted(itertools.chain(*given, *rest)) == list(range(23))
    again = ahead_of(build_loader(shuffled(), ENGINES[engine]())[0], [])
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == rest


@dataclass
class Pair:
    x: Any
    name: str


def test_batches_of_any_structure_are_mapped() -> None:
    batch = {"a": torch.ones(1), "b": [Pair(torch.ones(2), "n"), (torch.ones(3), None, "text", 5)]}
    doubled = mapped(batch, lambda value: value * 2)
    assert doubled["a"].item() == 2.0
    assert doubled["b"][0] == Pair(doubled["b"][0].x, "n")
    assert doubled["b"][0].x.tolist() == [2.0, 2.0]
    assert doubled["b"][1][1:] == (None, "text", 5)
    assert batch["a"].item() == 1.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("engine", [None, "stateful+workers", "nodes+threads"])
def test_prefetched_batches_are_on_the_device_and_the_same(engine: str | None) -> None:
    def rows(*switches: Switch) -> Tensor:
        data = torch.utils.data.TensorDataset(torch.arange(1 << 20).view(1024, 1024).float())
        loader, _ = build_loader(DataLoader(data, batch_size=64), switches, device=torch.device("cuda"))
        sums = []
        for (x,) in loader:
            x = x.to("cuda")
            for _ in range(20):  # keeps the device behind the program
                x = x * 1.0 + 0.0
            sums.append(x.sum(1))
        return torch.cat(sums)

    switches = [opt.DevicePrefetch(), opt.PinMemory(), *(ENGINES[engine]() if engine else [])]
    loader, _ = build_loader(shuffled(), switches, device=torch.device("cuda"))
    assert {batch.device.type for batch in loader} == {"cuda"}
    assert torch.equal(rows(*switches), rows())


# --- mistakes ---
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: opt.Prefetch(factor=0), r"prefetch\.factor is 1 or more; it was 0.*Try opt\."),
        (lambda: opt.StatefulLoader(every_steps=0), r"stateful_loader\.every_steps is 1 or more; it was 0.*Try opt\."),
        (lambda: opt.Nodes(threads=0), r"nodes\.threads is 1 or more; it was 0.*Try opt\."),
        (lambda: opt.Nodes(ahead=0), r"nodes\.ahead is 1 or more; it was 0.*Try opt\."),
        (lambda: opt.BatchSize(size=0), r"batch_size\.size is 1 or more; it was 0.*Try opt\."),
        (lambda: opt.BatchSize(limit=-1), r"batch_size\.limit is 1 or more; it was -1.*Try opt\."),
        (lambda: opt.BatchSize(size=8, limit=16), r"leaves nothing to search.*Try opt\."),
    ],
)
def test_a_bad_value_is_refused(make: Any, says: str) -> None:
    with pytest.raises(PerftrainError, match=says):
        make()
