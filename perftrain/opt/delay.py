"""The control with a known answer: adds a fraction of each step's own time to one phase."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from statistics import median
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
    ``phase``: data, forward, backward or optimizer.
    """

    fraction: float = 0.05
    phase: str = "forward"

    card: ClassVar[Card] = Card(
        name="delay",
        summary="control: makes one phase longer by a known fraction of the step",
        place=Place.CONTROL,
        numerics=Numerics.EXACT,
        cost="the delay",
    )

    def __post_init__(self) -> None:
        if self.phase not in DELAYABLE:
            raise PerftrainError(f"delay.phase is one of {', '.join(DELAYABLE)}; it was {self.phase!r}. Try opt.delay.phase=forward.")
        if not 0 <= self.fraction <= 10:
            raise PerftrainError(f"delay.fraction lies between 0 and 10; it was {self.fraction}. Try opt.delay.fraction=0.05.")

    def predict(self, now: StepBreakdown) -> Gain:
        return Gain(1 / (1 + self.fraction), 1 / (1 + self.fraction), f"it adds {self.fraction:.0%} to every step")

    def loader(self, options: LoaderOptions) -> LoaderOptions:
        return replace(options, wrap=(*options.wrap, _DelayedLoader.with_(self.fraction))) if self.phase == "data" else options

    def step(self, functions: StepFunctions) -> StepFunctions:
        if self.phase == "data":
            return functions
        device = next(functions.model.parameters()).device
        wait = _Waiter(self.fraction, _device_sleep() if device.type == "cuda" else _spin)
        name = {"forward": "forward", "backward": "backward", "optimizer": "optimizer_step"}[self.phase]
        inner: Callable[..., Any] = getattr(functions, name)

        def delayed(*arguments: Any) -> Any:
            result = inner(*arguments)
            wait()
            return result

        return replace(functions, **{name: delayed})


class _Waiter:
    """Waits for a fraction of the time since its last wait ended: that is the step's own time, without the delay.

    A pause of the whole program (another arm's turn) is no step: it counts as a usual one.
    """

    def __init__(self, fraction: float, sleep: Callable[[float], None]) -> None:
        self.fraction = fraction
        self.sleep = sleep
        self.recent: deque[float] = deque(maxlen=15)
        self.last: float | None = None

    def __call__(self) -> None:
        begin = perf_counter()
        if self.last is not None:
            own_s = begin - self.last
            usual_s = median(self.recent) if self.recent else own_s
            self.recent.append(own_s)
            self.sleep(self.fraction * (own_s if own_s < 3 * usual_s else usual_s))
        self.last = perf_counter()


def _spin(seconds: float) -> None:
    until = perf_counter() + seconds
    while perf_counter() < until:
        pass


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
        self.wait = _Waiter(fraction, _spin)

    @staticmethod
    def with_(fraction: float) -> Callable[[Iterable[Batch]], Iterable[Batch]]:
        return lambda loader: _DelayedLoader(loader, fraction)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.loader:
            self.wait()
            yield batch
