"""What is printed on the terminal. Every function prints to the console that it is given; this page draws a run."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from perftrain.facts import Diagnosis, RunRecord
from perftrain.report import run_words, units, words
from perftrain.report.bars import PhaseBar, Swatch, looks, phases_of
from perftrain.report.layout import avoids, line, named, paragraph, table, tries
from perftrain.report.listing import print_doctor, print_opts, print_runs
from perftrain.report.verdicts import print_ranking, print_verdict

__all__ = ["print_doctor", "print_opts", "print_ranking", "print_run", "print_runs", "print_verdict", "stdout_console"]

SIDE_BY_SIDE = 76
"""Columns from which two small tables stand beside each other."""


def stdout_console() -> Console:
    """A console on standard output; a character that its encoding lacks becomes "?", not an error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    return Console()


def print_run(console: Console, record: RunRecord, diagnosis: Diagnosis | None = None) -> None:
    """What ran where, where its time went, what rules it, and what to try next."""
    paragraph(console, run_words.workload_line(record), "bold")
    paragraph(console, run_words.place_line(record), "dim")
    switches = words.with_settings(record.settings, record.settings)
    paragraph(console, f"with {switches}" if record.settings else switches, "dim")
    if record.status != "complete":
        paragraph(console, f"{record.status.upper()}: {record.reason or 'what was measured until then'}", "bold red")
    console.print()
    _print_step(console, record)
    if diagnosis is not None:
        console.print()
        console.print(named(_findings(diagnosis)))


def _print_step(console: Console, record: RunRecord) -> None:
    """The phases as a bar, then their key beside the figures of the run."""
    now = record.breakdown
    figures = named(run_words.figures(record))
    if not now.step_s > 0:
        console.print(figures)
        return
    phases = phases_of([now])
    over = f" (mean of {units.count(now.steps, 'step')})"
    console.print(Text.assemble(("step ", "dim"), (units.seconds(now.step_s), "bold"), (over, "dim")))
    console.print(PhaseBar(now, phases, now.step_s))
    console.print()
    key = table("", "phase", "ms", "share", numbers=["ms", "share"], fixed=[""])
    for phase, look in looks(phases).items():
        spent = units.milliseconds(now.phase_s[phase])
        key.add_row(Swatch(look), line(units.label(phase)), line(spent), line(units.share(now.share(phase))))
    if console.width < SIDE_BY_SIDE:
        console.print(key)
        console.print()
        console.print(figures)
        return
    beside = Table.grid(padding=(0, 6, 0, 0))
    beside.add_row(key, Padding(figures, (1, 0, 0, 0)))
    console.print(beside)


def _findings(diagnosis: Diagnosis) -> Iterable[tuple[str, RenderableType]]:
    """The ruling bottleneck, what shows it, and what follows."""
    yield "healthy" if diagnosis.healthy else "bottleneck", line(diagnosis.sentence, "bold")
    if not diagnosis.causes:
        return
    ruling = diagnosis.causes[0]
    yield "", line(run_words.cause_line(ruling), "dim")
    if ruling.evidence:
        yield "evidence", Text("\n").join(line(run_words.evidence(e)) for e in ruling.evidence[:4])
    yield "behind it", run_words.behind(diagnosis)
    if ruling.tries:
        yield "try next", tries(ruling.tries)
    if ruling.avoids:
        yield "will not help", avoids(ruling.avoids)
