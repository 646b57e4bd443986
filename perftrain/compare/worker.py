"""A fresh process that hosts arms and obeys commands: one JSON line in, one out.

Where an arm needs several ranks, this process is rank 0 and passes the commands on (see ranks.py).
Started as ``python -m perftrain.compare.worker FD PARENT``; commands arrive on standard input, answers leave on the descriptor
``FD``, so that whatever the program under test prints cannot disturb them. It ends when its standard input does, and the
kernel kills it when its parent dies.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TextIO

import torch
from hydra.utils import instantiate

from perftrain.compare.arm import Arm, ranks_of, scatter_heap, shared_threads
from perftrain.compare.channel import WorkerFailed
from perftrain.compare.ranks import Group, meet_at
from perftrain.engine.process import die_with_parent, process_settings, seed_everything
from perftrain.engine.trainer import Trainer
from perftrain.facts import StepRow
from perftrain.measure.losses import NotFiniteLoss
from perftrain.measure.memory import peak_bytes, reset_peak
from perftrain.measure.meter import breakdown_of
from perftrain.measure.peaks import peaks
from perftrain.opt.base import Switch

PROGRESS_S = 0.25


class Host:
    """What a worker can be told to do: every public method is a command."""

    def __init__(self, spec: Mapping[str, Any], tell: Callable[[dict[str, Any]], None]) -> None:
        self.spec = spec
        self.recipe = instantiate(spec["recipe"])
        self.switches: dict[str, list[Switch]] = {name: [instantiate(o) for o in opts] for name, opts in spec["arms"].items()}
        self.device = torch.device(spec["device"])
        self.tell = tell
        self.arms: dict[str, Arm] = {}
        self.heap: list[torch.Tensor] = []
        self.group: Group | None = None
        self.place: Mapping[str, int] | None = spec.get("place")
        if self.place is not None:
            if self.device.type == "cuda":
                self.device = torch.device("cuda", self.place["rank"])
            meet_at(self.place, self.device)

    def obey(self, do: str, arguments: dict[str, Any], give_up: Callable[[WorkerFailed], None]) -> dict[str, Any]:
        """Run a command here, and on the other ranks of its arm where it has any."""
        command = getattr(self, do)
        arm = arguments.get("arm")
        size = ranks_of(self.switches[arm], self.device) if arm else None
        if self.place is None and size is not None and self.group is None:
            self.group = Group(self.spec, size, self.device, give_up)
        if self.group is None or (size is None and do not in ("drop", "scatter")):
            return command(**arguments)
        return self.group.call(do, arguments, lambda: command(**arguments))

    def scatter(self, seed: int) -> dict[str, Any]:
        """Before a round: hold blocks of random size, so that the arms of this round lie elsewhere."""
        self.heap = scatter_heap(random.Random(seed))
        return {}

    def build(self, arm: str, seed: int) -> dict[str, Any]:
        """Build an arm and warm it."""
        self.arms[arm] = built = Arm(self.recipe, self.switches[arm], seed, self.device)
        begin = time.perf_counter()
        rows = built.warm()
        return {"build_s": built.build_s, "warm_s": time.perf_counter() - begin, "step_s": min(row.step_s for row in rows[1:])}

    def block(self, arm: str, steps: int, each: bool = False) -> dict[str, Any]:
        """Train ``steps`` steps after one that only brings the caches back; ``each``: tell every step's seconds too."""
        rows = self.arms[arm].steps(steps + 1)[1:]
        return {**block_facts(rows), **({"step_s": [row.step_s for row in rows]} if each else {})}

    def drop(self) -> dict[str, Any]:
        for arm in self.arms.values():
            arm.drop()
        self.arms.clear()
        self.heap.clear()
        gc.collect()  # modules and optimizers are cycles; without this their memory would stay
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return {}

    def parity(self, arm: str, seed: int, steps: int) -> dict[str, Any]:
        """Losses of the first ``steps`` steps; also the peak memory, what building and warming up cost, and the switches' reports."""
        reset_peak(self.device)
        built = Arm(self.recipe, self.switches[arm], seed, self.device, keyed=True)
        try:
            rows = self._watched(built, steps)
            notes = [line for switch in self.switches[arm] for line in switch.report(built.run.functions.model)]
        except NotFiniteLoss as error:
            return {"losses": [], "not_finite": str(error), "peak_bytes": peak_bytes(self.device)}
        finally:
            built.drop()
        steady = breakdown_of(rows)
        lost_s = sum(row.step_s for row in rows) - len(rows) * steady.step_s
        return {
            "losses": [row.loss for row in rows],
            "peak_bytes": peak_bytes(self.device),
            "warmup_s": built.build_s + max(0.0, lost_s),
            "notes": notes,
        }

    def _watched(self, arm: Arm, steps: int) -> list[StepRow]:
        """All steps in one turn, telling how far it got."""
        rows: list[StepRow] = []
        begin = time.perf_counter()
        size = 1
        while len(rows) < steps:
            rows += arm.steps(min(size, steps - len(rows)))
            size = arm.agreed(max(1, int(size * PROGRESS_S / max(1e-6, time.perf_counter() - begin))))
            begin = time.perf_counter()
            self.tell({"step": len(rows), "steps": steps})
        return rows

    def train(self, arm: str, seed: int, steps: int) -> dict[str, Any]:
        """A whole training run, measured, with its evaluation."""
        with shared_threads(self.switches[arm], self.device):
            return self._train(arm, seed, steps)

    def _train(self, arm: str, seed: int, steps: int) -> dict[str, Any]:
        with process_settings(self.switches[arm]):
            seed_everything(seed)
            workload = self.recipe.build(seed)
        trainer = Trainer(
            workload.model,
            workload.loss_fn,
            workload.optimizer,
            workload.loader,
            opt=self.switches[arm],
            step=workload.step,
            evaluate=workload.evaluate,
            scheduler=workload.scheduler,
            clip_norm=workload.clip_norm,
            device=self.device,
            counters=workload.counters,
            samples_in=workload.samples_in,
        )
        failure: dict[str, Any] | None = None
        try:
            trainer.fit(steps, on_progress=lambda now: self.tell(asdict(now)))
        except (Exception, KeyboardInterrupt) as error:
            if self.place is not None:
                raise  # rank 0 tells
            failure = None if isinstance(error, KeyboardInterrupt) else failure_of(error)
            if self.group is not None:
                self.group.interrupt()
        return {"run": asdict(trainer.record), "rows": [asdict(row) for row in trainer.rows], "failure": failure}

    def peaks(self) -> dict[str, Any]:
        return peaks(self.device.type)

    def end(self) -> None:
        if self.group is not None:
            self.group.end()


def block_facts(rows: Sequence[StepRow]) -> dict[str, Any]:
    names = dict.fromkeys(name for row in rows for name in row.phase_s)
    return {
        "phase_s": {name: sum(row.phase_s.get(name, 0.0) for row in rows) for name in names},
        "seconds": sum(row.step_s for row in rows),
        "steps": len(rows),
        "samples": sum(row.samples for row in rows),
        "loss": rows[-1].loss,
    }


def failure_of(error: BaseException) -> dict[str, Any]:
    there = error.facts if isinstance(error, WorkerFailed) else {}  # on another rank
    return {
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "not_finite": isinstance(error, NotFiniteLoss),
        "out_of_memory": isinstance(error, (MemoryError, torch.OutOfMemoryError)),
        **there,
    }


def serve(commands: TextIO, tell: Callable[[dict[str, Any]], None]) -> None:
    host: Host | None = None

    def give_up(failure: WorkerFailed) -> None:
        tell({"failure": failure_of(failure)})
        os._exit(1)

    for line in commands:
        command = json.loads(line)
        name = command.pop("do")
        try:
            if name == "host":
                host = Host(command, lambda facts: tell({"progress": facts}))
                answer: dict[str, Any] = {}
            else:
                assert host is not None
                answer = host.obey(name, command, give_up)
            tell({"answer": answer})
        except KeyboardInterrupt:
            tell({"interrupted": True})
        except BaseException as error:
            tell({"failure": failure_of(error)})
    if host is not None:
        host.end()


def main() -> None:
    die_with_parent(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it starts with "&" ignore it; the coordinator asks with it
    out = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    turn = threading.Lock()

    def tell(message: dict[str, Any]) -> None:
        with turn:
            out.write(json.dumps(message) + "\n")

    serve(sys.stdin, tell)


if __name__ == "__main__":
    main()
