"""What a tuning came to: the answer in two lines, the ledger (promised beside measured), what was left out and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from perftrain.facts import Decision, Diagnosis, Verdict
from perftrain.report import units, words
from perftrain.report.diagnosis import print_phases
from perftrain.report.jsonfile import diagnosis_json, plain
from perftrain.report.layout import line, named, paragraph, table


def print_tuned(console: Console, program: str, found: Any) -> None:
    """``found``: what ``perftrain.tune.search.tune`` returns."""
    paragraph(console, program, "bold")
    total: Verdict | None = found.total
    if found.kept and total is not None:
        paragraph(console, f"FASTER {units.factor(total.speedup, total.ci95)} with {words.switch_names(found.kept)}", "bold green")
    else:
        paragraph(console, "NOTHING TO KEEP: no switch is proved to make this program faster", "bold")
    paragraph(console, f"{len(found.ledger)} measurements in {units.seconds(found.seconds)}; {found.stopped}", "dim")
    for name, diagnosis in (("before", found.before), ("after", found.after)):
        if diagnosis is not None and (name == "before" or found.kept):
            console.print()
            paragraph(console, name, "dim")
            print_phases(console, diagnosis.breakdown)
    _print_ledger(console, found)
    console.print()
    console.print(named(_rest(found)))


def _print_ledger(console: Console, found: Any) -> None:
    if not found.ledger:
        return
    rows = table("switch", "predicted", "measured", "", "kept", numbers=["predicted", "measured"], fixed=["switch"])
    for entry in found.ledger:
        measured = (
            units.factor(entry.verdict.speedup, entry.verdict.ci95)
            if entry.verdict.speedup
            else words.DECISION_WORDS[entry.verdict.decision]
        )
        rows.add_row(
            line(entry.switch),
            line(units.between(*entry.predicted)),
            line(measured),
            line("yes" if entry.kept else "no"),
            line(entry.reason),
        )
    console.print()
    console.print(rows)


def _rest(found: Any) -> Iterable[tuple[str, RenderableType]]:
    if found.untried:
        yield "not tried", Text("\n").join(Text.assemble((u.switch, "bold"), f": {units.one_line(u.reason)}") for u in found.untried)
    if found.edits:
        yield "by hand", Text("\n").join(line(units.one_line(e)) for e in found.edits)
    after: Diagnosis | None = found.after
    if after is not None:
        yield "what is next", line(after.sentence)


def print_edits(console: Console, edited: Mapping[str, Any]) -> None:
    """The switches as edits of the script, and what the edited copy gave."""
    console.print()
    if edited["text"]:
        paragraph(console, f"written into a copy: {edited['copy']} ({edited['diff']})", "bold")
        for row in str(edited["text"]).splitlines():
            paragraph(console, row, "green" if row.startswith("+") else "red" if row.startswith("-") else "dim")
    proof = edited.get("proof")
    if proof:
        paragraph(
            console,
            f"the copy against the script, in {proof['runs']} pairs of runs: {units.factor(proof['speedup'], tuple(proof['ci95']))}",
        )
    elif edited["text"]:
        paragraph(console, f"the copy could not be measured: {edited.get('proof_failed', '')}", "yellow")
    for said in edited["by_hand"]:
        paragraph(console, f"by hand: {said}")


def tune_json(found: Any, program: str, again: str) -> dict[str, Any]:
    """The documented shape of ``--json``; ``again``: the command that does it once more."""
    total: Verdict | None = found.total if found.kept else None
    return plain({
        "speedup": total.speedup if total else 1.0,
        "ci95": total.ci95 if total else None,
        "kept": list(found.kept),
        "rejected": [{"switch": e.switch, "reason": e.reason} for e in found.ledger if not e.kept],
        "untried": [{"switch": u.switch, "reason": u.reason} for u in found.untried],
        "ledger": [
            {"switch": e.switch, "predicted": list(e.predicted), "measured": e.verdict.speedup, "ci95": e.verdict.ci95, "kept": e.kept,
             "decision": e.verdict.decision, "beside": list(e.beside), "reason": e.reason}
            for e in found.ledger
        ],
        "next_bottleneck": str(found.after.causes[0].label) if found.after and found.after.causes else "",
        "ceiling": found.after.causes[0].upper_bound if found.after and found.after.causes else None,
        "edits": list(found.edits),
        "proved": bool(total and total.decision is Decision.FASTER),
        "seconds": found.seconds,
        "program": program,
        "again": again,
        "before": diagnosis_json(found.before) if found.before else None,
        "after": diagnosis_json(found.after) if found.after else None,
    })  # fmt: skip
