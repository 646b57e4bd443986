"""One fresh process of the benchmark: measures one arm, writes what it saw as JSON. Started by ``run.py``."""

from __future__ import annotations

import argparse
import json
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arms import Arm
    from workloads import Task, Workload

BEGIN = time.perf_counter()  # nothing but the standard library is loaded yet


class Turns:
    """Cuts a training into slices and gives the raw loop its turn in between.

    The hook is the dataset itself, the only thing that all arms share: when the first batch of a slice is asked for, the
    arm's slice before it is closed, the raw loop trains as many steps, and the arm goes on. An arm that fetches one batch
    ahead still trains ``slice_steps`` steps between two borders.
    """

    def __init__(self, workload: Workload, steps: int) -> None:
        from workloads import make_task

        self.slice_steps = workload.slice_steps
        self.raw_task: Task = make_task(workload, steps)
        self.raw_batches = iter(self.raw_task.loader)
        self.raw_s: list[float] = []
        self.arm_s: list[float] = []
        self.resumed: float | None = None

    def at_border(self) -> None:
        from arms import raw_steps

        begin = time.perf_counter()
        if self.resumed is not None:
            self.arm_s.append(begin - self.resumed)
        begin = time.perf_counter()
        raw_steps(self.raw_task, islice(self.raw_batches, self.slice_steps))
        self.resumed = time.perf_counter()
        self.raw_s.append(self.resumed - begin)


def measure(arm: Arm, workload: Workload, steps: int) -> dict[str, Any]:
    """One training: the seconds of each counted slice, and whether arm and raw loop ended in the same model."""
    from workloads import make_task

    slices = workload.slices(steps)
    total = slices * workload.slice_steps
    turns = Turns(workload, total)
    task = make_task(workload, total, turns.at_border, arm.dict_batches)
    arm.train(task)
    counted = slice(workload.warm_slices, slices - 1)
    return {
        "slice_steps": workload.slice_steps,
        "arm_slice_s": turns.arm_s[counted],
        "raw_slice_s": turns.raw_s[counted],
        "steps": {"asked": total, "raw": len(turns.raw_s) * workload.slice_steps},
        "final_loss": {"arm": final_loss(task, turns.raw_task), "raw": final_loss(turns.raw_task, turns.raw_task)},
        "same_parameters": same_parameters(task, turns.raw_task),
    }


def final_loss(task: Task, data: Task) -> float:
    """The trained model's loss on the first batch."""
    import torch

    x, y = data.loader.dataset.batches[0]  # type: ignore[attr-defined]
    with torch.no_grad():
        return float(task.loss_fn(task.model(x), y))


def same_parameters(one: Task, other: Task) -> bool:
    """Bit for bit: with another number of steps or other batches they would differ."""
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return all(bool((a == b).all()) for a, b in pairs)


def startup(name: str) -> dict[str, float]:
    """Seconds from before ``import torch`` until one step was trained and the arm returned."""
    import torch
    from arms import ARMS
    from workloads import MLP, make_task

    torch.set_num_threads(1)
    ARMS[name].train(make_task(MLP, steps=1))
    return {"startup_s": time.perf_counter() - BEGIN}


def overhead(name: str, steps: int) -> dict[str, Any]:
    import torch
    from arms import ARMS
    from workloads import WORKLOADS

    torch.set_num_threads(1)
    return {w.name: [measure(ARMS[name], w, steps) for _ in range(w.fits)] for w in WORKLOADS}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arm", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--startup", action="store_true")
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    found = startup(options.arm) if options.startup else overhead(options.arm, options.steps)
    options.result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
