"""A run, a verdict and a ranking as Markdown, for files and pull requests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from perftrain.facts import Diagnosis, RunRecord, Verdict, ranked
from perftrain.report import run_words, units, words
from perftrain.report.bars import phases_of
from perftrain.report.comparison import comparison


def verdict_markdown(verdict: Verdict) -> str:
    """The decision as a heading, the two arms as a table, the circumstances as a list."""
    parts = [
        f"## {escape(words.switch_names(verdict.switches))}: {escape(words.headline(verdict))}",
        escape(words.bundle(verdict)),
        escape(words.explanation(verdict)),
    ]
    if verdict.variant:
        rows = [(row.name, row.baseline, row.variant, row.change) for row in comparison(verdict)]
        parts.append(_table(("", "baseline", words.variant_name(verdict), "change"), rows, right=(1, 2)))
    facts = [("with", words.with_settings(verdict.switches, verdict.settings)), *words.circumstances(verdict)]
    return _joined([*parts, _list(facts)])


def ranking_markdown(verdicts: Iterable[Verdict]) -> str:
    """One row a verdict, best first; why one is not resolved, changes the result or does not run stands in its row."""
    rows = []
    for rank, verdict in enumerate(ranked(verdicts), 1):
        named = str(rank), words.switch_names(verdict.switches), words.decision_cell(verdict)
        rows.append((*named, units.factor(verdict.speedup, verdict.ci95), words.open_reason(verdict)))
    return _table(("", "switch", "verdict", "speedup", "reason"), rows, right=(0,)) + "\n"


def run_markdown(record: RunRecord, diagnosis: Diagnosis | None = None) -> str:
    """What ran where, where its time went, what rules it, and what to try next."""
    now = record.breakdown
    rows = [(units.label(p), units.milliseconds(now.phase_s[p]), units.share(now.share(p))) for p in phases_of([now])]
    parts = [
        f"## {escape(run_words.workload_line(record))}",
        escape(run_words.place_line(record)),
        f"Step {units.seconds(now.step_s or None)}, {escape(words.with_settings(record.settings, record.settings))}",
        _table(("phase", "ms", "share"), rows, right=(1, 2)) if rows else "",
        _list(run_words.figures(record)),
    ]
    return _joined(parts + (_diagnosis(diagnosis) if diagnosis else []))


def tune_markdown(found: Mapping[str, Any]) -> str:
    """What a tuning wrote as JSON: the answer, then the ledger."""
    kept = ", ".join(found["kept"])
    speed = units.factor(found["speedup"], tuple(found["ci95"]) if found.get("ci95") else None)
    parts = [f"## {escape(f'{speed} faster with {kept}' if kept else 'No switch is proved to make it faster')}"]
    rows = [
        (e["switch"], units.between(*e["predicted"]), units.factor(e["measured"], tuple(e["ci95"]) if e.get("ci95") else None),
         "kept" if e["kept"] else "", e.get("reason", ""))
        for e in found["ledger"]
    ]  # fmt: skip
    parts.append(_table(("switch", "predicted", "measured", "", "why"), rows, right=(1, 2)) if rows else "")
    parts.append(_list([("next bottleneck", found.get("next_bottleneck") or "none"), *(("by hand", e) for e in found.get("edits") or ())]))
    return _joined(parts)


def escape(text: str) -> str:
    """``text`` so that Markdown shows it as it stands, in a table too."""
    return re.sub(r"([\\`*_\[\]<>|#~$&])", r"\\\1", units.one_line(text))


def _diagnosis(diagnosis: Diagnosis) -> list[str]:
    parts = [f"**{escape(diagnosis.sentence)}**"]
    if not diagnosis.causes:
        return parts
    ruling = diagnosis.causes[0]
    facts = [("", run_words.cause_line(ruling)), *(("", run_words.evidence(seen)) for seen in ruling.evidence)]
    parts += [_list([*facts, ("behind it", run_words.behind(diagnosis))])]
    tries = [(run_words.remedy(t), units.between(*t.predicted), t.because) for t in ruling.tries]
    avoids = [(avoid.switch, avoid.because) for avoid in ruling.avoids]
    parts += [_table(("try next", "predicted", "because"), tries)] if tries else []
    parts += [_table(("will not help", "because"), avoids)] if avoids else []
    return parts


def _joined(parts: Iterable[str]) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"


def _list(facts: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"- {escape(name)}: {escape(told)}" if name else f"- {escape(told)}" for name, told in facts if told)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> str:
    rule = ["--:" if i in right else "---" for i in range(len(titles))]
    cells = [[escape(cell) for cell in row] for row in (titles, *rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (cells[0], rule, *cells[1:]))
