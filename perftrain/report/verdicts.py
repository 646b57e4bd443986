"""One verdict, and many of them ranked, on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from perftrain.facts import Decision, Try, Verdict, ranked
from perftrain.report import units, words
from perftrain.report.bars import Axis, PhaseBar, Scale, Swatch, Whisker, looks, phases_of
from perftrain.report.comparison import comparison
from perftrain.report.layout import line, named, paragraph, table, tries

STYLES = {
    Decision.FASTER: "bold green",
    Decision.NO_DIFFERENCE: "bold",
    Decision.NOT_RESOLVED: "bold yellow",
    Decision.SLOWER: "bold red",
    Decision.CHANGES_RESULT: "bold magenta",
    Decision.DOES_NOT_RUN: "bold red",
}


def print_verdict(console: Console, verdict: Verdict, next_tries: Sequence[Try] = ()) -> None:
    """The decision first; then both steps on one scale, what else changed, and how it was measured."""
    paragraph(console, words.headline(verdict), STYLES[verdict.decision])
    paragraph(console, f"with {words.with_settings(verdict.switches, verdict.settings)}", "dim")
    paragraph(console, words.bundle(verdict), "yellow")
    paragraph(console, words.explanation(verdict))
    if verdict.variant:
        console.print()
        console.print(_arms(verdict))
        console.print()
        console.print(_comparison(verdict))
    circumstances = [*words.circumstances(verdict), *([("try next", tries(next_tries))] if next_tries else [])]
    if circumstances:
        console.print()
        console.print(named(circumstances))


def print_ranking(console: Console, verdicts: Iterable[Verdict]) -> None:
    """One line a verdict, best first, with the intervals drawn on one logarithmic scale; then the reasons it has no room for."""
    rows = ranked(verdicts)
    if not rows:
        paragraph(console, "No verdicts yet.")
        return
    console.print(_ranking(rows, console.width))
    reasons = [(words.switch_names(v.switches), words.open_reason(v)) for v in rows if words.open_reason(v)]
    if reasons:
        console.print()
    for name, reason in reasons:
        console.print(Text.assemble((name, "bold"), f": {reason}", overflow="fold"))


def _ranking(rows: Sequence[Verdict], width: int) -> Table:
    """On a narrow console the cells break where they read best, so that the intervals keep their room."""
    scale, wide = Scale.over(interval for v in rows if (interval := words.interval(v))), width >= 100
    ranking = table("", "switch", "verdict", "speedup", numbers=[""], fixed=["verdict" if wide else "switch", "speedup"])
    if width >= 56:
        ranking.add_column(Axis(scale), ratio=1)
    for rank, v in enumerate(rows, 1):
        name, verdict, speed = words.switch_names(v.switches), words.decision_cell(v), units.factor(v.speedup, v.ci95)
        if not wide:
            name, verdict = name.replace(" + ", " +\n"), verdict.replace(" over", "\nover")
        if width < 76:
            speed = speed.replace("× ", "×\n")
        told = [line(rank, "dim"), line(name), line(verdict, STYLES[v.decision]), line(speed)]
        ranking.add_row(*told, *([Whisker(scale, v.speedup, v.ci95, STYLES[v.decision])] if width >= 56 else []))
    return ranking


def _arms(verdict: Verdict) -> Table:
    """Both steps as bars on one scale."""
    arms = [(n, a.breakdown) for n, a in (("baseline", verdict.baseline), (words.variant_name(verdict), verdict.variant)) if a]
    phases, scale_s = phases_of(b for _, b in arms), max(b.step_s for _, b in arms)
    grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(ratio=1)
    for name, breakdown in arms:
        grid.add_row(line(name, "dim"), line(units.seconds(breakdown.step_s)), PhaseBar(breakdown, phases, scale_s))
    return grid


def _comparison(verdict: Verdict) -> Table:
    """Both arms side by side; the rows of the phases are the key to the bars."""
    shape = table("", " ", "baseline", words.variant_name(verdict), "change")
    for column in shape.columns[2:4]:
        column.justify, column.no_wrap = "right", True
    rows = comparison(verdict)
    drawn = looks([row.phase for row in rows if row.phase])
    for row in rows:
        key: RenderableType = Swatch(drawn[row.phase]) if row.phase else ""
        shape.add_row(key, line(row.name), line(row.baseline), line(row.variant), line(row.change))
    return shape
