"""Lists: recorded runs, the check of machine and installation, the switches there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from perftrain.facts import RunRecord
from perftrain.report import run_words, units
from perftrain.report.layout import line, named, paragraph, table

RUN_COLUMNS: Sequence[tuple[str, int, Callable[[RunRecord], str]]] = (
    ("run", 0, lambda r: r.run_id),
    ("started", 110, lambda r: r.started[:19].replace("T", " ")),
    ("recipe", 72, lambda r: run_words.workload_name(r)),
    ("role", 100, lambda r: r.role),
    ("switches", 0, lambda r: " + ".join(r.settings) or "none"),
    ("step", 0, lambda r: units.seconds(r.breakdown.step_s or None)),
    ("samples/s", 72, lambda r: units.three(run_words.samples_per_s(r))),
    ("memory", 100, lambda r: units.size(r.peak_bytes)),
    ("status", 0, lambda r: r.status),
)
"""Title, width of the console from which the column is shown, text."""


def print_runs(console: Console, records: Iterable[RunRecord]) -> None:
    """One line a run, in the order given."""
    records = list(records)
    if not records:
        paragraph(console, "No runs are recorded here yet. Type: python -m perftrain")
        return
    shown = [column for column in RUN_COLUMNS if console.width >= column[1]]
    runs = table(*(title for title, _, _ in shown), numbers=["step", "samples/s", "memory"], fixed=["started", "status"])
    for record in records:
        runs.add_row(*(line(text(record), "" if record.status == "complete" else "red") for _, _, text in shown))
    console.print(runs)


def print_doctor(console: Console, facts: Mapping[str, Any]) -> None:
    """What this machine and installation are, what they reach, and what does not work here."""
    for title in ("machine", "software", "settings"):
        _section(console, title, [(units.label(k), units.fact(k, v)) for k, v in (facts.get(title) or {}).items()])
    _section(console, "measured peaks", list(_peaks(facts.get("peaks") or {})))
    limits = facts.get("limits") or []
    paragraph(console, "limits", "bold")
    if not limits:
        paragraph(console, "  none found")
    for limit in limits:
        told = line(units.one_line(limit.get("what") or units.UNKNOWN), "yellow")
        because = units.one_line(limit.get("because") or "")
        console.print(Text.assemble("  ", told, f": {because}" if because else ""))
    if facts.get("opts"):
        console.print()
        print_opts(console, facts["opts"])


def print_opts(console: Console, opts: Iterable[Mapping[str, Any]]) -> None:
    """The switches that run here, what each does to the losses, and those that do not run here, with the reason."""
    opts = list(opts)
    here, elsewhere = ([o for o in opts if bool(o.get("runs_here", True)) is runs] for runs in (True, False))
    paragraph(console, f"{units.count(len(here), 'switch')} that can run here", "bold")
    wide = console.width >= 100
    listed = table("switch", "losses", *(["relieves"] if wide else []), "what it does", fixed=["switch", "losses"])
    for opt in here:
        relieves = ", ".join(str(label) for label in opt.get("relieves") or ())
        told = [opt.get("name", ""), opt.get("numerics", ""), *([relieves] if wide else []), opt.get("summary", "")]
        listed.add_row(*(line(text) for text in told))
    console.print(listed)
    if elsewhere:
        console.print()
        paragraph(console, f"{units.count(len(elsewhere), 'switch')} that cannot", "bold")
        console.print(named((str(o.get("name", "")), units.one_line(o.get("reason") or "no reason given")) for o in elsewhere))


def _section(console: Console, title: str, facts: Sequence[tuple[str, str]]) -> None:
    if facts:
        paragraph(console, title, "bold")
        console.print(named((f"  {name}", told) for name, told in facts))
        console.print()


def _peaks(peaks: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Each peak is an amount and the seconds it took, or several of them by name."""
    for kind, found in peaks.items():
        told = units.flops if kind == "matmul" else units.bandwidth
        if not isinstance(found, Mapping):
            continue
        for name, peak in ({"": found} if "amount" in found else found).items():
            if isinstance(peak, Mapping):
                yield f"{units.label(kind)} {units.one_line(name)}".strip(), told(peak.get("amount"), peak.get("seconds"))
