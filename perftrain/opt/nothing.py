"""The A/A control: a switch that does nothing, so that any difference it shows is the instrument's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perftrain.facts import Card, Gain, Numerics, Place, StepBreakdown
from perftrain.opt.base import Switch


@dataclass(frozen=True)
class Nothing(Switch):
    """Compare the program with itself. Use it to check the instrument on your machine; it never speeds anything up."""

    card: ClassVar[Card] = Card(
        name="nothing",
        summary="control: compares the program with itself (A/A)",
        place=Place.CONTROL,
        numerics=Numerics.EXACT,
        cost="none",
    )

    def predict(self, now: StepBreakdown) -> Gain:
        return Gain(1.0, 1.0, "it does nothing")
