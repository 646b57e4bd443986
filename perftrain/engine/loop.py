"""The training loop. It names no switch: what is optional was decided before step 0 and arrives as callables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from perftrain.engine.ranks import Ranks
from perftrain.measure.meter import Meter
from perftrain.opt.seams import Batch, Losses, StepFunctions, nothing


@dataclass
class Run:
    """A program ready to train: what :func:`perftrain.engine.assemble.assemble` returns."""

    loader: Iterable[Batch]
    """As the switches made it; ``batches`` iterates it, epoch after epoch."""
    batches: Iterator[Batch]
    to_device: Callable[[Batch], Batch] | None
    """None where batches are where the model is."""
    functions: StepFunctions
    after_step: tuple[tuple[str, Callable[[int], None]], ...] = ()
    """(phase, function of the step's number): evaluation, checkpoints, progress."""
    in_flight: int = 0
    """Batches that loader workers may have ready ahead of the loop."""
    batches_per_epoch: int | None = None
    """None where the loader does not know."""
    ranks: Ranks = field(default_factory=Ranks)


def train(run: Run, steps: int, meter: Meter) -> None:
    """Train ``steps`` optimizer steps. Losses stay on the device: nothing here waits for it."""
    do, lap, batches, to_device = run.functions, meter.lap, run.batches, run.to_device
    forward, backward, split, samples_in = do.forward, do.backward, do.split, do.samples_in
    update = [call for call in (do.clip, do.optimizer_step, do.zero_grad, do.schedule) if call is not nothing]
    for step in range(steps):
        batch = next(batches)
        lap("data_wait")
        samples = samples_in(batch)  # before the copy: counting on a device would wait for it
        if to_device is not None:
            batch = to_device(batch)
            lap("copy")
        losses: Losses | None = None
        for part in (batch,) if split is None else split(batch):
            found = forward(part)
            lap("forward")
            backward(found["loss"])
            lap("backward")
            losses = found if losses is None else added(losses, found)
        for call in update:
            call()
        lap("optimizer")
        for phase, call_after in run.after_step:
            call_after(step)
            lap(phase)
        meter.end_step(samples, losses)


def added(losses: Losses, more: Losses) -> Losses:
    """Losses of micro-batches, each the part that it contributes to its batch's."""
    return {name: losses[name].detach() + value.detach() for name, value in more.items()}
