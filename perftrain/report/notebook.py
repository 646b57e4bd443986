"""Records as they look in a notebook: a small fragment of HTML that needs nothing else, light or dark as the page around it."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from functools import singledispatch
from typing import Any

from perftrain.facts import Diagnosis, RunRecord, StepBreakdown, Verdict
from perftrain.report import run_words, units, words
from perftrain.report.bars import looks, phases_of
from perftrain.report.comparison import comparison

BOX = "font:14px/1.45 system-ui,sans-serif;color:inherit;max-width:60em"
CELL = "text-align:left;padding:2px 14px 2px 0;color:inherit;background:none;vertical-align:top"
QUIET = "opacity:.7"
"""Colours are the notebook's own: a fragment cannot know whether it lies on white or on black."""


@singledispatch
def html_of(record: Any) -> str:
    """The fragment of a record; of anything else its text."""
    return _box(f"<pre>{_escaped(record)}</pre>")


@html_of.register
def _(now: StepBreakdown) -> str:
    return _box(_head(f"{units.seconds(now.step_s)} a step", f"mean of {units.count(now.steps, 'step')}"), *_phases({"": now}))


@html_of.register
def _(record: RunRecord) -> str:
    now = record.breakdown
    switches = words.with_settings(record.settings, record.settings)
    failed = "" if record.status == "complete" else f"{record.status.upper()}: {record.reason}"
    return _box(
        _head(f"{units.seconds(now.step_s)} a step", f"mean of {units.count(now.steps, 'step')}"),
        _quiet(run_words.workload_line(record)),
        _quiet(run_words.place_line(record)),
        _quiet(f"with {switches}" if record.settings else switches),
        _head(failed, "") if failed else "",
        *_phases({"": now}),
        _table(list(run_words.figures(record))),
    )


@html_of.register
def _(verdict: Verdict) -> str:
    arms = {name: arm.breakdown for name, arm in (("baseline", verdict.baseline), (words.variant_name(verdict), verdict.variant)) if arm}
    rows = [(r.name, r.baseline, r.variant, r.change) for r in comparison(verdict) if not r.phase] if arms else []
    return _box(
        _head(words.headline(verdict), ""),
        _quiet(f"with {words.with_settings(verdict.switches, verdict.settings)}"),
        _quiet(words.explanation(verdict)),
        _quiet(words.bundle(verdict)),
        *_phases(arms),
        _table(rows, ("", "baseline", words.variant_name(verdict), "change")),
        _table(list(words.circumstances(verdict))),
    )


@html_of.register
def _(diagnosis: Diagnosis) -> str:
    causes = []
    for cause in diagnosis.causes:
        told = [run_words.evidence(e) for e in cause.evidence]
        told += [f"Try {run_words.remedy(t)} (predicted {units.between(*t.predicted)}): {units.one_line(t.because)}" for t in cause.tries]
        head = cause.label.value if diagnosis.healthy else run_words.cause_line(cause)
        causes.append(f"<li><b>{_escaped(head)}</b><ul>{''.join(f'<li>{_escaped(line)}</li>' for line in told)}</ul></li>")
    vain = [(a.switch, a.because) for a in diagnosis.causes[0].avoids] if diagnosis.causes else []
    return _box(
        _head(diagnosis.sentence, ""),
        *_phases({"": diagnosis.breakdown}),
        f"<ol style='margin:6px 0;padding-left:20px'>{''.join(causes)}</ol>" if causes else "",
        _table(vain, ("will not help", "because")) if vain else "",
    )


# --- pieces ---
def _escaped(said: object) -> str:
    return html.escape(units.printable(said))


def _box(*parts: str) -> str:
    return f"<div style='{BOX}'>{''.join(parts)}</div>"


def _head(said: str, beside: str) -> str:
    return f"<div><b>{_escaped(said)}</b> <span style='{QUIET}'>{_escaped(beside)}</span></div>"


def _quiet(said: str) -> str:
    return f"<div style='{QUIET}'>{_escaped(said)}</div>" if said else ""


def _phases(steps: Mapping[str, StepBreakdown]) -> Iterable[str]:
    """Each step as a bar on one scale, then their key."""
    order, longest = phases_of(steps.values()), max((b.step_s for b in steps.values()), default=0.0)
    drawn = looks(order)
    for name, now in steps.items() if longest > 0 else ():
        parts = "".join(
            f"<span title='{_escaped(units.label(p))}' style='width:{100 * now.phase_s.get(p, 0.0) / longest:.2f}%;"
            f"background:{drawn[p].color}'></span>"
            for p in order
        )
        yield _quiet(f"{name}: {units.seconds(now.step_s)}") if name else ""
        yield f"<div style='display:flex;height:18px;border-radius:3px;overflow:hidden;margin:3px 0;outline:1px solid #8884'>{parts}</div>"
    for phase in order:
        told = " → ".join(f"{units.milliseconds(b.phase_s.get(phase, 0.0))} ms ({units.share(b.share(phase))})" for b in steps.values())
        key = f"<span style='display:inline-block;width:11px;height:11px;border-radius:2px;background:{drawn[phase].color}'></span>"
        yield f"<span style='white-space:nowrap;margin-right:14px'>{key} {_escaped(units.label(phase))} {_escaped(told)}</span> "


def _table(rows: Sequence[Sequence[str]], head: Sequence[str] = ()) -> str:
    if not rows:
        return ""
    titles = "".join(f"<th style='{CELL};font-weight:normal;{QUIET}'>{_escaped(cell)}</th>" for cell in head)
    lines = [f"<tr>{titles}</tr>"] if titles else []
    for row in rows:
        cells = "".join(f"<td style='{CELL}'>{_escaped(cell)}</td>" for cell in row)
        lines.append(f"<tr style='background:none'>{cells}</tr>")
    return f"<table style='margin:6px 0;border-collapse:collapse;font:inherit;color:inherit'>{''.join(lines)}</table>"
