"""What a training tells while it runs: loggers at each look at the losses, a live view once a second. The loop knows of neither."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence

from perftrain.facts import Progress
from perftrain.loggers import Logger
from perftrain.measure.meter import Meter, breakdown_of

VIEW_S = 1.0


def once_a_second(show: Callable[[Progress], None], meter: Meter, steps: int) -> Callable[[int], None]:
    """A function of the finished step that calls ``show`` at most once in ``VIEW_S``, with the steps since it last did."""
    begin = told = time.monotonic()
    seen = 0

    def tell(step: int) -> None:
        nonlocal told, seen
        now = time.monotonic()
        if now - told < VIEW_S:
            return
        told = now
        rows = meter.passed(seen)
        seen += len(rows)
        if rows:
            show(Progress(step + 1, steps, now - begin, breakdown_of(rows, 0), meter.latest_loss()))

    return tell


class Telling:
    """The loggers of one ``fit``. One that fails is left out from then on: a training is worth more than its log.

    Args:
        before: steps of earlier calls of ``fit``; the loggers' axis goes on.
    """

    def __init__(self, loggers: Sequence[Logger], before: int) -> None:
        self._loggers, self._before, self._seen = list(loggers), before, 0
        self._evaluated = 0

    def look(self, meter: Meter) -> None:
        """The mean of the steps since the last look."""
        rows = meter.passed(self._seen)
        if not rows:
            return
        now = breakdown_of(rows, 0)
        values = {f"train/{name}": value for name, value in meter.mean_losses(self._seen).items()}
        values |= {"time/step_s": now.step_s, **{f"time/{phase}_s": s for phase, s in now.phase_s.items()}}
        if now.step_s > 0:
            values["throughput/samples_per_s"] = now.samples / (now.steps * now.step_s)
        self._seen += len(rows)
        self._log(self._seen, values)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of an evaluation after ``step`` steps; the last of the periodic ones may be that at the end."""
        if metrics and step != self._evaluated:
            self._evaluated = step
            self._log(step, {f"evaluation/{name}": float(value) for name, value in metrics.items()})

    def close(self, meter: Meter, status: str) -> None:
        """Tell the last steps and let the loggers finish; called however the training ended."""
        self.look(meter)
        for logger in list(self._loggers):
            self._call(logger, lambda told=logger: told.close(status))

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        for logger in list(self._loggers):
            self._call(logger, lambda told=logger: told.log(self._before + step, values))

    def _call(self, logger: Logger, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:
            self._loggers.remove(logger)
            said = f"The logger {type(logger).__name__} failed and is left out from here on: {type(error).__name__}: {error}"
            warnings.warn(said, RuntimeWarning, stacklevel=2)
