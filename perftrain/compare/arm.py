"""One arm of a comparison inside a worker process: built, warmed, trained in blocks, dropped.

Several arms may live in one process. An arm that is not in its block keeps its random stream to itself, its process-wide
settings are off, and its loader workers are stopped, so that nobody prefetches during the other arm's turn.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from perftrain.data.keyed import Keyed
from perftrain.engine.assemble import assemble, make_plan
from perftrain.engine.loop import Run, train
from perftrain.engine.process import RandomState, process_settings, seed_everything
from perftrain.facts import StepRow
from perftrain.measure.meter import Meter
from perftrain.opt.base import Switch
from perftrain.opt.seams import Workload

WARM_STEPS = 3
WARM_S = 0.02


class Arm:
    """A recipe with its switches, alive in this process.

    Args:
        keyed: key the dataset's randomness by sample, so that moving the loading cannot change what is loaded.
    """

    def __init__(self, recipe: Any, switches: Sequence[Switch], seed: int, device: torch.device, keyed: bool = False) -> None:
        self.switches = switches
        self.device = device
        self.children: dict[int, Any] = {}
        begin = time.perf_counter()
        before = set(multiprocessing.active_children())
        with shared_threads(switches, device), process_settings(switches):
            seed_everything(seed)
            self.workload: Workload = recipe.build(seed)
            wrap = (lambda dataset: Keyed(dataset, seed) if hasattr(dataset, "__getitem__") else dataset) if keyed else None
            self.run: Run = assemble(self.workload, switches, device, wrap)
            self.random = RandomState()
        self._own_children(before)
        self.build_s = time.perf_counter() - begin

    def _own_children(self, before: set[Any]) -> None:
        for child in multiprocessing.active_children():
            if child not in before and child.pid is not None:
                self.children[child.pid] = child

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Everything of this arm is on inside, and off outside."""
        before = set(multiprocessing.active_children()) - set(self.children.values())
        self._signal(signal.SIGCONT)
        self.random.put()
        try:
            with shared_threads(self.switches, self.device), process_settings(self.switches):
                yield
        finally:
            self.random.take()
            self._own_children(before)
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for pid, child in list(self.children.items()):
            if not child.is_alive():
                del self.children[pid]
                continue
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def steps(self, count: int) -> list[StepRow]:
        """Train ``count`` steps in a turn of this arm."""
        with self.turn():
            meter = Meter(self.device, stop_on_nan=True, ranks=self.run.ranks)
            meter.start()
            train(self.run, count, meter)
            meter.finish()
            return meter.rows()

    def warm(self) -> list[StepRow]:
        """Steps until caches, clocks and prefetch queues are in their usual state."""
        rows = self.steps(WARM_STEPS + self.run.in_flight)
        missing_s = WARM_S - sum(row.step_s for row in rows[1:])
        more = 1 + int(missing_s / max(rows[-1].step_s, 1e-5)) if missing_s > 0 else 0
        return rows + self.steps(more) if (more := self.agreed(more)) else rows

    def agreed(self, steps: int) -> int:
        """What rank 0 says: all ranks must train equally many steps, whatever their clocks say."""
        return int(self.run.ranks.agreed(steps))

    def drop(self) -> None:
        """End the loader workers and free the memory."""
        self._signal(signal.SIGCONT)
        self.run.batches.close()  # type: ignore[attr-defined]
        del self.run, self.workload


def ranks_of(switches: Sequence[Switch], device: torch.device) -> int | None:
    """How many processes an arm with these switches needs to train together; None: one, as always."""
    return make_plan(switches, device).ranks


@contextmanager
def shared_threads(switches: Sequence[Switch], device: torch.device) -> Iterator[None]:
    """Ranks that share a CPU have together as many threads as the one process without them has."""
    threads, ranks = torch.get_num_threads(), ranks_of(switches, device)
    if ranks is None or device.type != "cpu":
        yield
        return
    torch.set_num_threads(max(1, threads // ranks))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def scatter_heap(rng: random.Random) -> list[torch.Tensor]:
    """Blocks of random size, held while arms are built, so that every round samples another memory layout."""
    return [torch.empty(rng.randrange(1, 1 << 20)) for _ in range(8)]
