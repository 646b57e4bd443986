"""What it takes to make a batch, seen from inside the DataLoader: fetching the samples, and putting them together.

The same code runs in the loader's worker processes, which leave what they saw in a file of their own.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from perftrain.attach.sampler import Sampler
from perftrain.whole import write_whole

FLUSH_EVERY_S = 0.5


class Fetching:
    """Wall and CPU seconds of the thread that fetches, by dataset and by collate function, for one process."""

    def __init__(self, folder: Path, thread: int) -> None:
        self.folder, self.pid, self.thread = folder, os.getpid(), thread
        self.sums = {"batches": 0, "samples": 0, "wall_s": 0.0, "cpu_s": 0.0, "delay_s": 0.0, "collate_wall_s": 0.0, "collate_cpu_s": 0.0}
        self.sampler: Sampler | None = None
        self._collate = (0.0, 0.0)
        self._flushed = time.perf_counter()
        self._before: dict[str, int] = {}

    def collate(self, function: Any, samples: Any) -> Any:
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            return function(samples)
        finally:
            self._collate = (time.perf_counter() - wall, time.thread_time() - cpu)

    def fetch(self, original: Any, fetcher: Any, index: Any) -> Any:
        """One batch, in whichever process makes it."""
        self._collate = (0.0, 0.0)
        if not self._before:
            self._before = transferred()
        delay = queued_s() if self.sampler is not None else 0.0  # only a worker needs it, and it reads a file
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            return original(fetcher, index)
        finally:
            now = time.perf_counter()
            spent, cpu_spent = now - wall, time.thread_time() - cpu
            s = self.sums
            s["batches"] += 1
            s["samples"] += len(index) if hasattr(index, "__len__") else 1
            s["collate_wall_s"] += self._collate[0]
            s["collate_cpu_s"] += self._collate[1]
            s["wall_s"] += spent - self._collate[0]
            s["cpu_s"] += cpu_spent - self._collate[1]
            s["delay_s"] += queued_s() - delay if delay else 0.0

    def in_worker(self) -> None:
        """Called in a loader's worker after each batch: look at its stack as well, and leave the sums now and then."""
        if self.sampler is None:
            self.thread = threading.get_ident()
            self.sampler = Sampler(self.thread, lambda: "worker")
            self.sampler.start()
        self.flush(False)

    def flush(self, last: bool) -> None:
        now = time.perf_counter()
        if not self.sums["batches"] or not (last or now - self._flushed > FLUSH_EVERY_S):
            return
        self._flushed = now
        self.sums |= {name: amount - self._before.get(name, amount) for name, amount in transferred().items()}
        path = self.folder / f"fetch-{self.pid}.json"
        content = {**self.sums, "pid": self.pid, "rows": self.sampler.rows()[:100] if self.sampler else []}
        write_whole(path, json.dumps(content))


def transferred() -> dict[str, int]:
    """Bytes so far that this process read from files (``read_bytes``) and that came from the disk itself (``disk_bytes``; the rest was
    in memory already), and that the machine received from other machines (``received_bytes``); Linux only."""
    found = {}
    try:
        with open("/proc/self/io") as f:
            told = dict(line.split(": ") for line in f)
        found = {"read_bytes": int(told["rchar"]), "disk_bytes": int(told["read_bytes"])}
        with open("/proc/net/dev") as f:
            links = [line.split(":") for line in f if ":" in line]
        found["received_bytes"] = sum(int(numbers.split()[0]) for name, numbers in links if name.strip() != "lo")
    except (OSError, KeyError, ValueError, IndexError):
        pass
    return found


def queued_s() -> float:
    """Seconds that this thread was ready to run and had no core (Linux: /proc/thread-self/schedstat); 0 where unknown."""
    try:
        with open("/proc/thread-self/schedstat") as f:
            return int(f.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
