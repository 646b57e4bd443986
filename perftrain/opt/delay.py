"""The control with a known answer: adds a fraction of each step's own time to one phase."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, ClassVar

import torch

from perftrain.facts import Card, Gain, Numerics, PerftrainError, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import Batch, LoaderOptions, StepFunctions

DELAYABLE = ("data", "forward", "backward", "optimizer")


@dataclass(frozen=True)
class Delay(Switch):
    """Make every step longer by ``fraction`` (0.05 = 5 %) of its own time, spent in ``phase``.

    The right verdict is 1 / (1 + fraction). For checking the instrument and the diagnosis, never for training.
    ``phase``: data, forward, backward or optimizer. With several threads a wait before backward also lets the other threads
    fall asleep, which costs up to 1 % more; at the end of a step (optimizer) it does not.
    """

    fraction: float = 0.05
    phase: str = "optimizer"

    card: ClassVar[Card] = Card(
        name="delay",
        summary="control: makes one phase longer by a known fraction of the step",
        place=Place.CONTROL,
        numerics=Numerics.EXACT,
        cost="the delay",
    )

    def __post_init__(self) -> None:
        if self.phase not in DELAYABLE:
            raise PerftrainError(f"delay.phase is one of {', '.join(DELAYABLE)}; it was {self.phase!r}. Try opt.delay.phase=optimizer.")
        if not 0 <= self.fraction <= 10:
            raise PerftrainError(f"delay.fraction lies between 0 and 10; it was {self.fraction}. Try opt.delay.fraction=0.05.")

    def predict(self, now: StepBreakdown) -> Gain:
        return Gain(1 / (1 + self.fraction), 1 / (1 + self.fraction), f"it adds {self.fraction:.0%} to every step")

    def loader(self, options: LoaderOptions) -> LoaderOptions:
        return replace(options, wrap=(*options.wrap, partial(_DelayedLoader, fraction=self.fraction))) if self.phase == "data" else options

    def step(self, functions: StepFunctions) -> StepFunctions:
        if self.phase == "data":
            return functions
        device = next(functions.model.parameters()).device
        name = {"forward": "forward", "backward": "backward", "optimizer": "optimizer_step"}[self.phase]
        wait = (delayed_on_device if device.type == "cuda" else delayed)(getattr(functions, name), self.fraction)
        return replace(functions, **{name: wait})


def delayed(inner: Callable[..., Any], fraction: float) -> Callable[..., Any]:
    """``inner``, then a wait for ``fraction`` of the time since the last wait ended: the step's own time, without the delay.

    What the waiting itself costs counts as part of the wait, and what a wait took too long the next one is shorter; it is all
    in one function because each further one would cost microseconds that are not in the fraction. A pause of the whole program
    (another arm's turn) is no step: it counts as a usual one.
    """
    last = usual_s = late_s = 0.0

    def call(*arguments: Any) -> Any:
        nonlocal last, usual_s, late_s
        result = inner(*arguments)
        begin = perf_counter()
        if last:
            own_s = begin - last
            if usual_s and own_s > 3 * usual_s:
                own_s = usual_s
            usual_s += (own_s - usual_s) * (0.1 if usual_s else 1.0)
            until = begin + fraction * own_s - late_s
            while perf_counter() < until:
                pass
            last = perf_counter()
            late_s = min(last - until, fraction * own_s)  # a pause within the wait is nobody's debt
        else:
            last = perf_counter()
        return result

    return call


def delayed_on_device(inner: Callable[..., Any], fraction: float) -> Callable[..., Any]:
    """The same on a CUDA device's own timeline, which lags behind the program: a wait follows from the steps that are done.

    The first few steps, of which none is done yet, are not delayed.
    """
    sleep = _device_sleep()
    running: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
    last: torch.cuda.Event | None = None
    usual_s = 0.0

    def call(*arguments: Any) -> Any:
        nonlocal last, usual_s
        result = inner(*arguments)
        if last is not None:
            running.append((last, _mark()))
        while running and running[0][1].query():
            begin, end = running.popleft()
            own_s = 1e-3 * begin.elapsed_time(end)
            usual_s += (min(own_s, 3 * usual_s or own_s) - usual_s) * (0.1 if usual_s else 1.0)
        if usual_s:
            sleep(fraction * usual_s)
        last = _mark()
        return result

    return call


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _device_sleep() -> Callable[[float], None]:
    """Keeps the CUDA device busy for so many seconds, in the stream's order, calibrated once."""
    cycles = 50_000_000
    torch.cuda._sleep(1_000_000)
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    torch.cuda._sleep(cycles)
    after.record()
    after.synchronize()
    cycles_per_s = cycles / (before.elapsed_time(after) * 1e-3)
    return lambda seconds: torch.cuda._sleep(int(seconds * cycles_per_s))


class _DelayedLoader:
    """A loader whose every batch comes late."""

    def __init__(self, loader: Iterable[Batch], fraction: float) -> None:
        self.loader = loader
        self._following = delayed(next, fraction)  # one for all epochs: the first batch of each is late too

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self.loader)
        while True:
            try:
                batch = self._following(batches)
            except StopIteration:
                return
            yield batch
