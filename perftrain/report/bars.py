"""What is drawn instead of written: the phases of a step as one stacked bar, an interval as a dot with whiskers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.style import Style
from rich.text import Text

from perftrain.facts import PHASES, StepBreakdown
from perftrain.report import units


@dataclass(frozen=True)
class Look:
    """How a phase is drawn: told apart by colour, and without colours by its glyph."""

    color: str
    glyph: str
    ascii_glyph: str

    def fill(self, cells: int, plain: bool) -> Text:
        return Text((self.ascii_glyph if plain else self.glyph) * cells, Style(color=self.color))


# After Okabe and Ito, whose colours the colour-blind can tell apart; waiting for data is the loudest.
LOOKS: Mapping[str, Look] = {
    "data_wait": Look("#F26B1D", "░", "w"),
    "copy": Look("#E69F00", "╱", "/"),
    "forward": Look("#0072B2", "█", "#"),
    "backward": Look("#56B4E9", "▒", "="),
    "optimizer": Look("#009E73", "╳", "x"),
    "evaluation": Look("#CC79A7", "≡", "e"),
    "checkpoint": Look("#F0E442", "┃", "|"),
    "rest": Look("#999999", "·", "."),
}
OWN_LOOKS = (Look("#CC79A7", "◆", "A"), Look("#F0E442", "○", "B"), Look("#009E73", "▲", "C"), Look("#E69F00", "◇", "D"))
"""For phases that a user named, in turn."""


def phases_of(breakdowns: Iterable[StepBreakdown]) -> list[str]:
    """Every phase that took time, in drawing order: the known ones, the user's own, the rest."""
    seen = dict.fromkeys(p for b in breakdowns for p, s in b.phase_s.items() if s > 0)
    own = [p for p in seen if p not in PHASES]
    return [p for p in (*PHASES[:-1], *own, PHASES[-1]) if p in seen]


def looks(phases: Sequence[str]) -> dict[str, Look]:
    own = [p for p in phases if p not in LOOKS]
    return {p: LOOKS[p] if p in LOOKS else OWN_LOOKS[own.index(p) % len(OWN_LOOKS)] for p in phases}


def cells(parts: Sequence[float], whole: float, width: int) -> list[int]:
    """Split ``width`` cells in proportion; rounding never adds up: the edges are rounded, not the parts."""
    edges = [0]
    for i in range(len(parts)):
        edges.append(round(width * sum(parts[: i + 1]) / whole) if whole > 0 else 0)
    return [right - left for left, right in pairwise(edges)]


@dataclass(frozen=True)
class PhaseBar:
    """One step as a stacked bar. The full width stands for ``scale_s``, so that bars of several runs compare."""

    breakdown: StepBreakdown
    phases: Sequence[str]
    """Of all bars drawn together, so that one look means one phase in all of them."""
    scale_s: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts = [max(0.0, self.breakdown.phase_s.get(p, 0.0)) for p in self.phases]
        drawn, bar = looks(self.phases), Text(no_wrap=True, overflow="crop")
        for phase, n in zip(self.phases, cells(parts, self.scale_s, options.max_width), strict=True):
            bar.append_text(drawn[phase].fill(n, options.ascii_only))
        yield bar

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(8, options.max_width), options.max_width)


@dataclass(frozen=True)
class Swatch:
    """The key to one phase: three cells of its glyph."""

    look: Look

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.look.fill(3, options.ascii_only)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(3, 3)


@dataclass(frozen=True)
class Scale:
    """A logarithmic axis of speedups that always holds 1.0×."""

    low: float
    high: float

    @staticmethod
    def over(intervals: Iterable[tuple[float, float]]) -> Scale:
        """Wide enough for all intervals, with a little air."""
        ends = [1.0, *(e for interval in intervals for e in interval if e > 0 and math.isfinite(e))]
        low, high = min(ends), max(ends)
        air = max((high / low) ** 0.04, 1.01)
        return Scale(low / air, high * air)

    def cell(self, value: float, width: int) -> int:
        at = math.log(max(value, 1e-9) / self.low) / math.log(self.high / self.low)
        return min(width - 1, max(0, round(at * (width - 1))))


@dataclass(frozen=True)
class Whisker:
    """An interval as ``├──●──┤`` on a common scale, with a line at 1.0×; without an interval the line alone."""

    scale: Scale
    value: float | None = None
    ci95: tuple[float, float] | None = None
    style: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, plain = options.max_width, options.ascii_only
        row = [(" ", "")] * width
        row[self.scale.cell(1.0, width)] = ("|" if plain else "│", "dim")
        if self.value is not None and math.isfinite(self.value):
            low, high = self.ci95 or (self.value, self.value)
            left, right = self.scale.cell(low, width), self.scale.cell(high, width)
            if right - left > 1:
                row[left : right + 1] = [("-" if plain else "─", self.style)] * (right - left + 1)
                row[left], row[right] = ("[" if plain else "├", self.style), ("]" if plain else "┤", self.style)
            row[self.scale.cell(self.value, width)] = ("o" if plain else "●", self.style)
        yield Text.assemble(*row, no_wrap=True, overflow="crop")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(8, options.max_width), options.max_width)


@dataclass(frozen=True)
class Axis:
    """The head of a column of whiskers: the ends of the scale, and 1.0× above its line."""

    scale: Scale

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, low, high = options.max_width, units.factor(self.scale.low), units.factor(self.scale.high)
        row = " " * min(self.scale.cell(1.0, width), max(0, width - 2)) + "1×"
        if len(low) < len(row) - 2:
            row = low + row[len(low) :]
        if len(row) + len(high) < width:
            row = row.ljust(width - len(high)) + high
        yield Text(row, "dim", no_wrap=True, overflow="crop")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(8, options.max_width), options.max_width)
