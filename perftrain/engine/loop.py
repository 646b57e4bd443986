"""The training loop. It names no switch: what is optional was decided before step 0 and arrives as callables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from perftrain.measure.meter import Meter
from perftrain.opt.seams import Batch, StepFunctions


@dataclass
class Run:
    """A program ready to train: what :func:`perftrain.engine.assemble.assemble` returns."""

    batches: Iterator[Batch]
    to_device: Callable[[Batch], Batch]
    samples_in: Callable[[Batch], int]
    functions: StepFunctions
    micro_batches: int = 1
    after_step: tuple[tuple[str, Callable[[int], None]], ...] = ()
    """(phase, function of the step's number): evaluation, checkpoints, progress."""
    in_flight: int = 0
    """Batches that loader workers may have ready ahead of the loop."""


def train(run: Run, steps: int, meter: Meter) -> None:
    """Train ``steps`` optimizer steps. Losses stay on the device: nothing here waits for it."""
    do, lap, batches = run.functions, meter.lap, run.batches
    for step in range(steps):
        samples = 0
        for _ in range(run.micro_batches):
            batch = next(batches)
            lap("data_wait")
            batch = run.to_device(batch)
            lap("copy")
            losses = do.forward(batch)
            lap("forward")
            do.backward(losses["loss"])
            lap("backward")
            samples += run.samples_in(batch)
        do.clip()
        do.optimizer_step()
        do.zero_grad()
        do.schedule()
        lap("optimizer")
        for phase, call in run.after_step:
            call(step)
            lap(phase)
        meter.end_step(samples, losses)
