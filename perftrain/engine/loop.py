"""The training loop. It names no switch: what is optional was decided before step 0 and arrives as callables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from perftrain.measure.meter import Meter
from perftrain.opt.seams import Batch, StepFunctions, nothing


@dataclass
class Run:
    """A program ready to train: what :func:`perftrain.engine.assemble.assemble` returns."""

    loader: Iterable[Batch]
    """As the switches made it; ``batches`` iterates it, epoch after epoch."""
    batches: Iterator[Batch]
    to_device: Callable[[Batch], Batch] | None
    """None where batches are where the model is."""
    samples_in: Callable[[Batch], int]
    functions: StepFunctions
    micro_batches: int = 1
    after_step: tuple[tuple[str, Callable[[int], None]], ...] = ()
    """(phase, function of the step's number): evaluation, checkpoints, progress."""
    in_flight: int = 0
    """Batches that loader workers may have ready ahead of the loop."""
    batches_per_epoch: int | None = None
    """None where the loader does not know."""


def train(run: Run, steps: int, meter: Meter) -> None:
    """Train ``steps`` optimizer steps. Losses stay on the device: nothing here waits for it."""
    do, lap, batches, to_device, samples_in = run.functions, meter.lap, run.batches, run.to_device, run.samples_in
    forward, backward = do.forward, do.backward
    update = [call for call in (do.clip, do.optimizer_step, do.zero_grad, do.schedule) if call is not nothing]
    for step in range(steps):
        samples, losses = 0, None
        for _ in range(run.micro_batches):
            batch = next(batches)
            lap("data_wait")
            if to_device is not None:
                batch = to_device(batch)
                lap("copy")
            losses = forward(batch)
            lap("forward")
            backward(losses["loss"])
            lap("backward")
            samples += samples_in(batch)
        for call in update:
            call()
        lap("optimizer")
        for phase, call_after in run.after_step:
            call_after(step)
            lap(phase)
        meter.end_step(samples, losses)
