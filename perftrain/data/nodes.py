"""A loader of torchdata.nodes: whole batches are made by threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from perftrain.data.resume import Resumable


class Gate:
    """Threads pass it for each batch. Closed, it lets those inside finish and keeps the others out."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open, self._inside = True, 0

    def open(self) -> None:
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._open = False
            self._changed.wait_for(lambda: self._inside == 0)

    @contextmanager
    def passing(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._open)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()


GATE = Gate()
"""Of all loaders here: whoever asks for a batch opens it, the end of the switch's turn closes it."""


@dataclass(frozen=True)
class Making:
    """Makes a batch, or a sample where the loader makes no batches. Called in the threads, so it must not hold the loader:
    what threads hold lives until they end, and they end when the loader does."""

    dataset: Any
    collate_fn: Any
    batched: bool

    def __call__(self, index: Any) -> Any:
        with GATE.passing():
            if not self.batched:
                return self.collate_fn(self.dataset[index])
            several = getattr(self.dataset, "__getitems__", None)
            samples = several(index) if callable(several) else [self.dataset[i] for i in index]
            return self.collate_fn(samples)


class NodesLoader:
    """Takes the arguments of ``DataLoader`` and gives the same batches in the same order, made by ``threads`` threads.

    ``ahead`` batches for each thread wait ready, beside the two of each that are being made. ``state_dict`` and
    ``load_state_dict`` resume in the middle of an epoch (which samples come, not their random numbers). Arguments about
    worker processes have no meaning here.
    """

    def __init__(self, *, threads: int, ahead: int, dataset: Any, **arguments: Any) -> None:
        from torchdata import nodes

        named = ("batch_size", "shuffle", "sampler", "batch_sampler", "collate_fn", "drop_last", "generator")
        plain = DataLoader(dataset, **{name: arguments[name] for name in named if name in arguments})
        self.dataset = dataset
        self.batch_size, self.drop_last, self.generator = plain.batch_size, plain.drop_last, plain.generator
        self.num_workers, self.prefetch_factor = threads, 2 + ahead  # batches in flight: their product (torchdata makes 2 a thread)
        batched = plain.batch_sampler is not None
        drawn_from = getattr(plain.sampler, "generator", None) or plain.generator
        self.sampler = Resumable(plain.batch_sampler if batched else plain.sampler, drawn_from)
        node = nodes.IterableWrapper(self.sampler)
        making = Making(dataset, plain.collate_fn, batched)
        node = nodes.ParallelMapper(node, making, num_workers=threads, in_order=True, method="thread")
        if arguments.get("pin_memory"):
            node = nodes.PinMemory(node)
        self._loader = nodes.Loader(nodes.Prefetcher(node, threads * ahead), restart_on_stop_iteration=False)

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        torch.empty((), dtype=torch.int64).random_(generator=self.generator)  # as DataLoader does: the same shuffle follows
        GATE.open()
        try:
            for batch in self._loader:
                yield batch
                GATE.open()
        finally:
            GATE.open()  # a thread at the gate could not end

    def state_dict(self) -> dict[str, Any]:
        GATE.open()
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)
