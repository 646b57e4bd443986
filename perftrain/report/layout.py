"""The three shapes that everything on the terminal has: a line of text, named facts, a table. No markup is ever interpreted."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from perftrain.facts import Avoid, Try
from perftrain.report import run_words, units

LABEL_WIDTH = 13


def line(said: object, style: str = "") -> Text:
    """Text as it stands: brackets are brackets, control characters are gone."""
    return Text(units.printable(said), style, overflow="fold")


def paragraph(console: Console, said: str, style: str = "") -> None:
    """Print ``said`` if there is anything to say."""
    if said:
        console.print(line(said, style))


def named(facts: Iterable[tuple[str, RenderableType]], label_width: int = LABEL_WIDTH) -> Table:
    """Facts beside their names; strings are taken literally, and a fact without words is left out."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True, min_width=label_width)
    grid.add_column(overflow="fold")
    for name, told in facts:
        if told != "":
            grid.add_row(line(name), line(told) if isinstance(told, str) else told)
    return grid


def table(*titles: str, numbers: Iterable[str] = (), fixed: Iterable[str] = ()) -> Table:
    """An empty table without rules; ``numbers`` are set to the right and, like ``fixed``, never broken over lines."""
    numbers, fixed = set(numbers), set(fixed)
    shape = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for title in titles:
        right = title in numbers
        shape.add_column(line(title), justify="right" if right else "left", no_wrap=right or title in fixed, overflow="fold")
    return shape


def tries(attempts: Iterable[Try]) -> Text:
    """Switches to try, each with the predicted gain and the reason for it."""
    told = []
    for attempt in attempts:
        gain = f" (predicted {units.between(*attempt.predicted)})"
        told.append(Text.assemble((run_words.remedy(attempt), "bold"), gain, _because(attempt.because)))
    return Text("\n").join(told)


def avoids(vain: Iterable[Avoid]) -> Text:
    """Switches that will not help, and why."""
    return Text("\n").join(Text.assemble((units.one_line(a.switch), "bold"), _because(a.because)) for a in vain)


def _because(reason: str) -> str:
    return f": {units.one_line(reason)}" if reason else ""
