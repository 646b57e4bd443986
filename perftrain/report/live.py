"""A training while it runs: how far it is, where its latest steps spend their time. Drawn when it tells something, by nobody else."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from perftrain.facts import Progress
from perftrain.report import units
from perftrain.report.bars import PhaseBar, looks, phases_of
from perftrain.report.layout import line
from perftrain.report.progress import lines, on_a_terminal

DRAW_S, LINE_S = 1.0, 30.0
"""Seconds between two drawings on a terminal, and between two lines elsewhere."""
BAR_WIDTH = 30
Show = Callable[[Progress], None]


@contextmanager
def live_view(description: str = "Training", console: Console | None = None) -> Iterator[Show]:
    """Draws what it is told, at most once a second; off a terminal a plain line now and then.

    >>> with live_view() as show:
    ...     trainer.fit(steps=1000, on_progress=show)

    A console that is not given is standard error, and draws only if standard output is a terminal too.
    """
    console, terminal = on_a_terminal(console)
    with (_drawn if terminal else _told)(console, units.one_line(description)) as show:
        yield show


@contextmanager
def _drawn(console: Console, description: str) -> Iterator[Show]:
    """No thread of its own: the training may share its cores with this."""
    start = line(f"{description} …")
    with Live(start, console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False) as live:
        plain = console.options.ascii_only
        yield _rarely(DRAW_S, -math.inf, lambda now: live.update(drawing(description, now, plain), refresh=True))


@contextmanager
def _told(console: Console, description: str) -> Iterator[Show]:
    with lines(console, description):
        yield _rarely(
            LINE_S, time.monotonic() + LINE_S, lambda now: console.print(line(" · ".join((description, *in_words(now)))), soft_wrap=True)
        )


def _rarely(every_s: float, due: float, show: Show) -> Show:
    """``show`` from ``due`` on, once in ``every_s``. On a beat of its own: who tells once a second is a little late or early."""

    def rarely(now: Progress) -> None:
        nonlocal due
        moment = time.monotonic()
        if moment >= due:
            due = (due if moment < due + every_s else moment) + every_s
            show(now)

    return rarely


# --- what is shown ---
def in_words(now: Progress) -> list[str]:
    """``step 120 of 1,000``, a step's time, throughput, loss, and how long it will take."""
    latest = now.breakdown
    speed = units.rate(latest.samples, latest.steps * latest.step_s)
    left_s = now.seconds / now.step * (now.steps - now.step) if now.step else None
    return [
        f"step {now.step:,} of {now.steps:,}",
        f"{units.seconds(latest.step_s)} a step",
        *([f"{units.three(speed)} samples/s"] if speed else []),
        f"loss {units.three(now.loss)}",
        f"{units.seconds(left_s)} left",
    ]


def drawing(description: str, now: Progress, plain: bool = False) -> RenderableType:
    """The bar of all steps, the figures, the phases of the latest steps as a bar and its key."""
    head = Table.grid(padding=(0, 2, 0, 0))
    done = ProgressBar(total=max(1, now.steps), completed=now.step, width=BAR_WIDTH)
    head.add_row(line(description, "bold"), done, line(f"{units.seconds(now.seconds)} so far", "dim"))
    phases = phases_of([now.breakdown])
    key = Text("  ").join(
        Text.assemble(look.fill(1, plain), f" {units.label(phase)} {units.share(now.breakdown.share(phase))}")
        for phase, look in looks(phases).items()
    )
    return Group(head, line(" · ".join(in_words(now))), PhaseBar(now.breakdown, phases, now.breakdown.step_s), key)
