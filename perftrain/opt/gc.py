"""Python's cyclic garbage collector: at chosen steps instead of whenever it likes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

from perftrain.facts import Bottleneck, Card, Gain, Numerics, PerftrainError, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import StepFunctions


@dataclass(frozen=True)
class GC(Switch):
    """Switch automatic collection off, set aside what lives already (``gc.freeze``), collect ``generation`` every ``every_steps`` steps.

    Pays where a step makes many Python objects (dicts of samples, long lists of strings) and pauses show as single slow steps;
    with several ranks, where each would pause at another time and all wait. Not for steps of large tensors and little Python.
    Tensors in reference cycles live until the next collection: fewer steps if memory grows. Objects that the program itself froze
    before stay as they are, and nothing more is frozen then. Source: Python documentation, module gc.
    """

    every_steps: int = 100
    generation: int = 2

    card: ClassVar[Card] = Card(
        name="gc",
        summary="no automatic garbage collection; collect every so many steps instead",
        place=Place.PROCESS,
        numerics=Numerics.EXACT,
        relieves=(Bottleneck.HOST_PYTHON,),
        cost="garbage in reference cycles waits for the next collection",
    )

    def __post_init__(self) -> None:
        if self.every_steps < 1:
            raise PerftrainError(f"gc.every_steps is 1 or more; it was {self.every_steps}. Try opt.gc.every_steps=100.")
        if self.generation not in (0, 1, 2):
            raise PerftrainError(f"gc.generation is 0, 1 or 2; it was {self.generation}. Try opt.gc.generation=2.")

    def predict(self, now: StepBreakdown) -> Gain:
        share = now.share("data_wait", "forward", "backward", "optimizer")
        return Gain.from_share(share, 1.0, 1.1, f"collections may fall into {share:.0%} of the step; they are a small part of it")

    @contextmanager
    def process(self) -> Iterator[None]:  # type: ignore[override]
        was_enabled, frozen_before = gc.isenabled(), gc.get_freeze_count() > 0
        try:
            if not frozen_before:  # unfreeze knows only all or nothing
                gc.freeze()
            gc.disable()
            yield
        finally:
            if not frozen_before:
                gc.unfreeze()
            if was_enabled:
                gc.enable()

    def step(self, functions: StepFunctions) -> StepFunctions:
        steps = 0

        def schedule() -> None:
            nonlocal steps
            functions.schedule()
            steps += 1
            if steps % self.every_steps == 0:
                gc.collect(self.generation)

        return replace(functions, schedule=schedule)
