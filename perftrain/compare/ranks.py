"""Several ranks of one arm. Rank 0 is the worker that the coordinator commands; it starts the others and passes commands on.

All ranks do the same command at the same time, and rank 0 answers once all have: between commands every one of them waits at
its pipe, so the group as a whole stands still while the other arm has its turn. A rank that fails ends the command at once
with its own traceback, and none of them outlives rank 0.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from perftrain.compare.channel import Worker, WorkerFailed
from perftrain.engine.ranks import TIMEOUT, start_group

GRACE_S = 2.0
"""For a rank to fail by itself of what made another one fail."""
HOST = "127.0.0.1"


def meet(device: torch.device, store: Store, rank: int, size: int) -> None:
    """Join the ranks of this machine, without a network."""
    if sys.platform.startswith("linux"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    start_group(device, store, rank=rank, size=size)


def meet_at(place: Mapping[str, int], device: torch.device) -> None:
    """The same on a rank that was started for it."""
    store = TCPStore(HOST, place["port"], place["size"], is_master=False, timeout=TIMEOUT)
    meet(device, store, place["rank"], place["size"])


class Group:
    """Rank 0's hold on the others. Call it from the main thread: a process lives as long as the thread that started it.

    Args:
        spec: what a worker must know.
        size: number of ranks, this one included.
        give_up: called from another thread when a rank failed and this one waits for it in vain; it must end this process.
    """

    def __init__(self, spec: Mapping[str, Any], size: int, device: torch.device, give_up: Callable[[WorkerFailed], None]) -> None:
        self.size, self.device, self._give_up = size, device, give_up
        self._free = threading.Event()
        """This rank does not wait for the others in an exchange."""
        self._ended = False
        store = TCPStore(HOST, 0, size, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
        place = {"port": store.port, "size": size}
        self._others = {rank: Worker({**spec, "place": {**place, "rank": rank}}, {}) for rank in range(1, size)}
        self._together(lambda: meet(device, store, 0, size), Worker.ready)

    def call(self, do: str, arguments: Mapping[str, Any], own: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Run a command on all ranks, of which ``own`` is this one's part, and put their answers together.

        Raises:
            WorkerFailed: it failed on another rank.
            Exception: it failed here.
        """
        if self._ended:
            raise RuntimeError("the ranks of this arm have ended; it needs a fresh process")
        for worker in self._others.values():
            worker.begin(do, **arguments)
        mine, others = self._together(own, Worker.answer)
        return put_together(mine, others, self.device)

    def _together(self, own: Callable[[], Any], others: Callable[[Worker, float], Any]) -> tuple[Any, list[Any]]:
        """``own()`` here, while a thread for each other rank waits for what it answers."""
        answers: dict[int, Any] = {}
        failures: dict[int, WorkerFailed] = {}

        def watch(rank: int) -> None:
            try:
                answers[rank] = others(self._others[rank], 2 * TIMEOUT.total_seconds())
            except WorkerFailed as failure:
                failures[rank] = of_rank(rank, failure)
                if not self._free.wait(GRACE_S):
                    self._give_up(failures[rank])

        self._free.clear()
        watchers = [threading.Thread(target=watch, args=(rank,), daemon=True) for rank in self._others]
        for watcher in watchers:
            watcher.start()
        try:
            mine = own()
        except BaseException as error:
            self._free.set()
            cause = self._cause(error, watchers, failures)
            self._kill(watchers)
            raise cause from None
        self._free.set()
        for watcher in watchers:
            watcher.join()
        if failures and not self._ended:
            self._kill(watchers)
            raise next(iter(failures.values()))
        return mine, [answers[rank] for rank in sorted(answers)]

    def _cause(self, error: BaseException, watchers: list[threading.Thread], failures: Mapping[int, WorkerFailed]) -> BaseException:
        """A broken connection is what a failed rank leaves behind; its own failure says more, once it is here."""
        if not isinstance(error, RuntimeError):
            return error
        for watcher in watchers:
            watcher.join(GRACE_S / len(watchers))
        return next(iter(failures.values()), error)

    def interrupt(self) -> None:
        """Kill the others in the middle of a command, of which this rank will answer with what it has."""
        self._ended = True
        for worker in self._others.values():
            worker.kill()

    def _kill(self, watchers: list[threading.Thread]) -> None:
        self.interrupt()
        for watcher in watchers:
            watcher.join()
        self.end()

    def end(self) -> None:
        """End the others. They have nothing to save, and this process may itself be given half a second only."""
        self.interrupt()
        for worker in self._others.values():
            worker.end()


def of_rank(rank: int, failure: WorkerFailed) -> WorkerFailed:
    message, facts = f"rank {rank}: {failure}", {**failure.facts, "traceback": f"rank {rank}:\n{failure.traceback}"}
    return WorkerFailed(failure.kind, message, {**facts, "message": message})


def put_together(mine: dict[str, Any], others: list[dict[str, Any]], device: torch.device) -> dict[str, Any]:
    """Rank 0's answer: steps and losses are those of all ranks. Memory is the fullest device's; the CPU's is one for all, so its sum."""

    def merged(answers: list[dict[str, Any]]) -> dict[str, Any]:
        peaks = [answer["peak_bytes"] for answer in answers]
        known = None not in peaks
        return {**answers[0], "peak_bytes": (max(peaks) if device.type == "cuda" else sum(peaks)) if known else None}

    if "peak_bytes" in mine:
        return merged([mine, *others])
    if "run" in mine and others:
        return {**mine, "run": merged([answer["run"] for answer in (mine, *others)])}
    return mine
