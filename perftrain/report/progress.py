"""Progress of anything that takes over two seconds, on standard error so that standard output stays clean."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from perftrain.report import units
from perftrain.report.layout import line

Update = Callable[..., None]
"""``update(completed, "round 4")``: how much of ``total`` is done, and what is being done."""


@contextmanager
def progress(description: str, total: float | None = None, console: Console | None = None) -> Iterator[Update]:
    """A bar while the block runs; off a terminal one plain line before it and one after it.

    ``total`` is in any unit (seconds of a budget, steps); without it the bar only shows that something is going on.
    A console that is not given is standard error, and draws only if standard output is a terminal too.
    """
    console, terminal = on_a_terminal(console)
    with (_bar if terminal else lines)(console, units.one_line(description), total) as update:
        yield update


def on_a_terminal(console: Console | None) -> tuple[Console, bool]:
    """Where to draw, and whether there is a terminal to draw on."""
    live = console.is_interactive if console else sys.stdout.isatty()
    console = console or Console(stderr=True)
    return console, live and console.is_interactive


@contextmanager
def _bar(console: Console, description: str, total: float | None) -> Iterator[Update]:
    """Drawn once a second: what is being measured shares the machine with this."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[detail]}", style="dim", markup=False),
    )
    with Progress(*columns, console=console, transient=True, refresh_per_second=1, redirect_stdout=False) as bar:
        task = bar.add_task(description, total=total, detail="")

        def update(completed: float | None = None, detail: str | None = None) -> None:
            told = bar.tasks[0].fields["detail"] if detail is None else units.one_line(detail)
            bar.update(task, completed=completed, detail=told)

        yield update


@contextmanager
def lines(console: Console, description: str, total: float | None = None) -> Iterator[Update]:
    """One line before, one line after: what there is off a terminal."""
    started, ended = time.perf_counter(), "stopped"
    console.print(line(f"{description} …"), soft_wrap=True)

    def update(completed: float | None = None, detail: str | None = None) -> None:
        """Nothing to draw on."""

    try:
        yield update
        ended = "done"
    finally:
        console.print(line(f"{description}: {ended} after {units.seconds(time.perf_counter() - started)}"), soft_wrap=True)
