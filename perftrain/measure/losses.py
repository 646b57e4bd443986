"""The losses of a training run: logged without waiting for the device, read in one go, checked now and then."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Protocol

import torch
from torch import Tensor

from perftrain.facts import PerftrainError


class NotFiniteLoss(PerftrainError, FloatingPointError):
    """The loss became NaN or infinite. ``step`` counts from 0."""

    def __init__(self, message: str, step: int = -1) -> None:
        super().__init__(message)
        self.step = step


class Averaging(Protocol):
    """The processes that train together: what the log asks of them."""

    @property
    def size(self) -> int: ...
    def mean(self, values: Sequence[float]) -> list[float]: ...


class LossLog:
    """Losses by name, each with the step it belongs to.

    Kept as numbers side by side: an object for each step would touch fresh memory in every step, which costs 4 µs.

    Args:
        on_device: the losses live on a device that one does not wait for; :meth:`read` fetches them.
        stop_on_nan: whether :meth:`check` raises.
        ranks: whose losses are averaged with these, where there are any.
    """

    def __init__(self, on_device: bool, stop_on_nan: bool, ranks: Averaging | None) -> None:
        self._on_device, self._stop_on_nan, self._ranks = on_device, stop_on_nan, ranks
        self._columns: dict[str, tuple[array[int], array[float]]] = {}
        self._waiting: list[tuple[int, Mapping[str, Tensor]]] = []
        self._checked: dict[str, int] = {}

    def add(self, step: int, losses: Mapping[str, Tensor]) -> None:
        if self._on_device:
            self._waiting.append((step, {name: value.detach() for name, value in losses.items()}))
            return
        for name, value in losses.items():
            steps, values = self._columns.get(name) or self._column(name)
            steps.append(step)
            values.append(value.item())

    def read(self) -> None:
        """Fetch what is still on the device, in one go."""
        waiting, self._waiting = self._waiting, []
        for name in dict.fromkeys(name for _, losses in waiting for name in losses):
            having = [(step, losses[name].float()) for step, losses in waiting if name in losses]
            steps, values = self._column(name)
            steps.extend(step for step, _ in having)
            values.extend(torch.stack([value for _, value in having]).tolist())

    def check(self) -> None:
        """Average what is new over the ranks, and stop where it is not finite. All ranks come here at the same steps.

        Raises:
            NotFiniteLoss: the loss became NaN or infinite.
        """
        for name in sorted(self._columns):
            steps, values = self._columns[name]
            start, self._checked[name] = self._checked.get(name, 0), len(values)
            if self._ranks is not None and start < len(values):
                values[start:] = array("d", self._ranks.mean(values[start:]))
            if not self._stop_on_nan or name != "loss":
                continue
            for step, value in zip(steps[start:], values[start:], strict=True):
                if not math.isfinite(value):
                    raise NotFiniteLoss(f"The loss must stay finite; it was {value} at step {step}.", step)

    def by_step(self, start: int = 0) -> dict[int, float]:
        """The loss that is differentiated, of each step from ``start`` on that has one."""
        steps, values = self._columns.get("loss", ((), ()))
        begin = bisect_left(steps, start)
        return dict(zip(steps[begin:], values[begin:], strict=True))

    def means(self, start: int) -> dict[str, float]:
        """Every loss by name, averaged over the steps from ``start`` on that have it."""
        new = {name: values[bisect_left(steps, start) :] for name, (steps, values) in sorted(self._columns.items())}
        return {name: fmean(values) for name, values in new.items() if values}

    def latest(self) -> float | None:
        """The last loss that is known."""
        _, values = self._columns.get("loss", ((), ()))
        return values[-1] if values else None

    def by_name(self) -> dict[str, list[float]]:
        return {name: list(values) for name, (_, values) in sorted(self._columns.items())}

    def _column(self, name: str) -> tuple[array[int], array[float]]:
        return self._columns.setdefault(name, (array("q"), array("d")))
