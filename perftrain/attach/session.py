"""One watched process: what it has seen, when it looks closer, when it has seen enough, what it leaves behind."""

from __future__ import annotations

import atexit
import gc
import json
import multiprocessing.util
import os
import resource
import sys
import time
import weakref
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from perftrain.attach import facts_of, seams
from perftrain.attach.clock import Clock
from perftrain.attach.fetching import Fetching
from perftrain.attach.nvtx import Ranges
from perftrain.attach.orders import Orders
from perftrain.attach.probes import Turns
from perftrain.attach.sampler import Sampler
from perftrain.attach.trace import Trace
from perftrain.whole import write_whole

WARM_STEPS = 3
TRACE_AFTER_S, TRACE_AFTER_STEPS = 3.0, 300
STATUS_EVERY_S = 0.5
watching: list[Session] = []
"""The session of this process, if it is watched: for a loop of perftrain's own, which tells it more than torch's seams can."""


class Session:
    """Everything perftrain keeps in a process of the program. ``open`` once; the seams call the rest."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self._begin()

    def _begin(self) -> None:
        """A process begins anew: at the start, and in the child after a fork."""
        self.pid = os.getpid()
        self.clock = Clock()
        self.fetching = Fetching(Path(self.orders.folder), self.clock.thread)
        self.sampler: Sampler | None = None
        self.anchor: Any = None
        self.optimizers: dict[int, Any] = {}
        self.owned: set[int] = set()
        self.roots: dict[int, Any] = {}
        self.beside: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        """Modules that are called with gradients on and hold parameters that ask for one, of which no optimizer has any."""
        self.loaders: dict[int, dict[str, Any]] = {}
        self.counts: Counter[str] = Counter()
        self.sums: dict[str, float] = defaultdict(float)
        self.trace = Ranges(self) if self.orders.profiled_steps else Trace(self)
        self.turns = Turns(self) if self.orders.probes or self.orders.always else None
        self.losses: list[Any] = []
        self.traced_rows: set[int] = set()
        self.rss: list[tuple[int, int]] = []
        self.state: dict[str, Any] = {}
        self.first_step_s = 0.0
        self.before: tuple[dict[str, float], dict[str, float], int] = ({}, {}, 0)
        self.stop_at: int | None = None
        self.saved = False
        self._status_s = 0.0
        self._gc_began = 0.0

    def open(self) -> None:
        watching.append(self)
        seams.lay_open(self)
        gc.callbacks.append(self._on_gc)
        atexit.register(self.save)
        os.register_at_fork(after_in_child=self._begin)
        multiprocessing.util.register_after_fork(self, Session._in_child)

    def _in_child(self) -> None:
        """A forked child of multiprocessing leaves without atexit; its finalizers do run."""
        multiprocessing.util.Finalize(self, self.save, exitpriority=50)

    # --- what the seams report ---
    def saw_optimizer(self, optimizer: Any) -> None:
        if id(optimizer) not in self.optimizers:
            self.optimizers[id(optimizer)] = optimizer
            self.owned |= {id(p) for group in optimizer.param_groups for p in group["params"]}

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has stepped; the first one ever to do so marks the end of every step."""
        if self.anchor is None:
            self.anchor = optimizer
            self.first_step_s = time.perf_counter() - self.clock.started_s
        if optimizer is not self.anchor:
            return
        row = self.clock.end_step()
        self._direct(row.end_s)
        self.clock.skip()

    def went_back(self) -> None:
        """A backward pass of a program that has no optimizer of torch: it updates by hand, and backward passes mark its steps."""
        if not self.first_step_s:
            self.first_step_s = time.perf_counter() - self.clock.started_s
        row = self.clock.end_step()
        self._direct(row.end_s)
        self.clock.skip()

    def _direct(self, now: float) -> None:
        """Once a step: look closer, take turns, stop."""
        done = len(self.clock.rows)
        if done == WARM_STEPS and self.sampler is None:
            self.sampler = Sampler(self.clock.thread, lambda: self.clock.phase)
            self.sampler.start()
            self.before = (dict(self.counts), dict(self.sums), done)
        if now - self._status_s > STATUS_EVERY_S:
            self._say_status(done, now)
        if self.orders.stop_after_steps and done >= self.orders.stop_after_steps:
            self._finish(done)
        if self.turns is not None:
            self.turns.step_done()
            if self.turns.over and not self.orders.to_the_end:
                self._finish(done)
            if self.orders.probes:
                return
        self._look_closer(done, now)
        if self._seen_enough(done, now):
            self._finish(done)

    def _look_closer(self, done: int, now: float) -> None:
        if self.trace.running:
            self.traced_rows.add(done - 1)
            self.trace.step_done()
            if not self.trace.running and self.sampler:
                self.sampler.pause(False)
        elif self.orders.trace and not self.trace.taken and done > WARM_STEPS:
            since = now - self.clock.rows[0].end_s
            if since > TRACE_AFTER_S or done > TRACE_AFTER_STEPS:
                if self.sampler:
                    self.sampler.pause(True)
                self.state = facts_of.program(self)
                self.trace.start()

    def _seen_enough(self, done: int, now: float) -> bool:
        if self.orders.to_the_end or self.trace.running or done <= WARM_STEPS:
            return False
        since = now - self.clock.rows[0].end_s
        return since > self.orders.most_s or (since > self.orders.observe_s and done >= self.orders.least_steps)

    def _finish(self, done: int) -> None:
        """Stop here; with several ranks, all at the same step, which the first of them names."""
        world = facts_of.world()
        if world[1] > 1:
            agreed = Path(self.orders.folder) / "stop_at"
            if self.stop_at is None and not agreed.exists() and world[0] == 0:
                write_whole(agreed, str(done + 2))  # another rank that reads half of it stops alone
            if agreed.exists():
                self.stop_at = int(agreed.read_text())
            if self.stop_at is None or done < self.stop_at:
                return
        self.save()
        (Path(self.orders.folder) / "enough").touch()
        sys.stdout.flush()
        raise SystemExit(0)

    def _on_gc(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._gc_began = time.perf_counter()
        elif self.clock.here() and self.clock.rows:
            self.sums["gc_s"] += time.perf_counter() - self._gc_began
            self.counts["gc"] += 1
            self.counts["gc_full"] += info["generation"] == 2

    def _say_status(self, done: int, now: float) -> None:
        self._status_s = now
        self.rss.append((done, _resident_bytes()))
        if facts_of.world()[0] == 0:
            path = Path(self.orders.folder) / f"status-{self.pid}.json"
            write_whole(path, json.dumps({"steps": done, "seconds": now - self.clock.started_s}))

    # --- what it leaves behind ---
    def save(self) -> None:
        """Write what was seen; a process that never trained leaves nothing but what it fetched."""
        if self.saved or os.getpid() != self.pid:
            return
        self.saved = True
        if self.turns is not None:
            self.turns.close()
        self.fetching.flush(True)
        if self.sampler is not None:
            self.sampler.stop()
        if not self.clock.rows:
            return
        if self.trace.running:
            self.trace.finish()
        record = facts_of.record(self)
        write_whole(Path(self.orders.folder) / f"process-{self.pid}.json", json.dumps(record, default=str))


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
