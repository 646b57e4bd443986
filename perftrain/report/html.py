"""One self-contained HTML page from what a verb wrote with ``--json``, or from a recorded run: nothing is loaded from anywhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from perftrain.facts import PHASES, PerftrainError, StepRow
from perftrain.report import charts, units
from perftrain.report.bars import LOOKS, OWN_LOOKS
from perftrain.report.memory_timeline import memory_timeline
from perftrain.report.roofline import roofline

TEMPLATES = Path(__file__).parent / "templates"
KINDS = ("tune", "verdicts", "verdict", "diagnosis", "run")


def page_of(facts: Mapping[str, Any], version: str, rows: Sequence[StepRow] = ()) -> str:
    """The page. All text is escaped by the template engine.

    Args:
        facts: what ``--json`` wrote: one object with ``schema`` and at least one of tune, verdicts, verdict, diagnosis, run.
        rows: the steps of a recorded run, if there is one.

    Raises:
        PerftrainError: nothing in it that could be shown.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    kind = next((k for k in KINDS if facts.get(k)), None)
    if kind is None:
        raise PerftrainError(f"A report is made of {', '.join(KINDS)}; the file holds {', '.join(facts) or 'nothing'}.")
    page: dict[str, Any] = {
        "title": "perftrain", "place": "", "answer": "", "second": "", "tone": "", "bars": [], "phase_rows": [], "charts": [], "causes": [],
        "causes_title": "What rules it", "tables": [], "again": "", "version": version,
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }  # fmt: skip
    BUILDERS[kind](page, facts)
    page["again"] = str((facts if kind == "verdicts" else facts[kind]).get("again") or "")
    if rows:
        page["charts"] += [charts.timeline(rows), charts.histogram(rows)]
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.get_template("report.html.j2").render(page=page)


# --- the kinds ---
def _tune(page: dict[str, Any], facts: Mapping[str, Any]) -> None:
    found = facts["tune"]
    page["title"] = str(found.get("program") or "tuning")
    page["place"] = str(found.get("place") or "")
    kept = found.get("kept") or []
    if kept:
        page["answer"] = f"{units.factor(found['speedup'], _pair(found.get('ci95')))} faster with {', '.join(kept)}"
        page["tone"] = "good"
    else:
        page["answer"] = "No switch is proved to make this program faster"
    page["second"] = (
        f"{len(found['ledger'])} measurements in {units.seconds(found['seconds'])}. Next bottleneck: "
        f"{found.get('next_bottleneck') or 'none'}."
    )
    before, after = found.get("before"), found.get("after")
    _bars(page, {name: d["breakdown"] for name, d in (("before", before), ("after", after)) if d})
    _waterfall(page, found)
    if found["ledger"]:
        page["charts"].append(
            charts.intervals("Measured speedups", [(e["switch"], e["measured"], _pair(e["ci95"]), e["kept"]) for e in found["ledger"]])
        )
        rows = [
            (
                e["switch"],
                units.between(*e["predicted"]),
                units.factor(e["measured"], _pair(e["ci95"])),
                "kept" if e["kept"] else "no",
            )
            for e in found["ledger"]
        ]
        page["tables"].append(_table("The ledger: promised and measured", ("switch", "predicted", "measured", ""), rows, (1, 2)))
    rejected = [(r["switch"], r["reason"]) for r in found.get("rejected") or []]
    if rejected:
        page["tables"].append(_table("Measured and rejected", ("switch", "why"), rejected))
    untried = [(u["switch"], u["reason"]) for u in found.get("untried") or []]
    if untried:
        page["tables"].append(_table("Not tried", ("switch", "why"), untried))
    if found.get("edits"):
        page["tables"].append(_table("By hand", (), [(e,) for e in found["edits"]]))
    if before:
        page["causes_title"] = "What ruled it before"
        _causes(page, before)
    _machine(page, {name: d for name, d in (("before", before), ("after", after if kept else None)) if d})
    _environment(page, found)


def _verdict(page: dict[str, Any], facts: Mapping[str, Any]) -> None:
    found = facts["verdict"]
    page["title"] = " + ".join(found["switches"])
    page["answer"] = (
        f"{found['decision'].replace('_', ' ')} {units.factor(found['speedup'], _pair(found['ci95'])) if found['speedup'] else ''}".strip()
    )
    page["tone"] = {"faster": "good", "slower": "bad", "changes_result": "bad", "does_not_run": "bad"}.get(found["decision"], "")
    page["second"] = str(found.get("reason") or "")
    arms = {name: found[name] for name in ("baseline", "variant") if found.get(name)}
    _bars(page, {name: arm["breakdown"] for name, arm in arms.items()})
    if found.get("speedup"):
        page["charts"].append(charts.intervals("Speedup", [(page["title"], found["speedup"], _pair(found["ci95"]), True)]))
    rows = [("smallest effect that would have been seen", units.share(found["resolution"]) if found.get("resolution") else units.UNKNOWN),
            ("losses", str((found.get("parity") or {}).get("detail", "not compared"))),
            *((f"memory peak, {name}", units.size(arm["peak_bytes"])) for name, arm in arms.items()),
            *(("note", note) for note in found.get("notes") or ())]  # fmt: skip
    page["tables"].append(_table("How it was measured", (), rows))


def _verdicts(page: dict[str, Any], facts: Mapping[str, Any]) -> None:
    found = facts["verdicts"]
    page["title"], page["answer"] = "A sweep", f"{sum(v['decision'] == 'faster' for v in found)} of {len(found)} switches are faster"
    timed = [v for v in found if v.get("speedup")]
    page["charts"].append(
        charts.intervals(
            "Speedups", [(" + ".join(v["switches"]), v["speedup"], _pair(v["ci95"]), v["decision"] == "faster") for v in timed]
        )
    )
    rows = [
        (" + ".join(v["switches"]), v["decision"].replace("_", " "), units.factor(v["speedup"], _pair(v["ci95"])), v["reason"])
        for v in found
    ]
    page["tables"].append(_table("Ranking", ("switch", "verdict", "speedup", "why"), rows, (2,)))


def _diagnosis(page: dict[str, Any], facts: Mapping[str, Any]) -> None:
    found = facts["diagnosis"]
    page["title"] = " ".join(found.get("program") or ["diagnosis"])
    page["answer"], page["tone"] = found["sentence"], "good" if found["healthy"] else ""
    _bars(page, {"a step": found["breakdown"]})
    _machine(page, {"": found})
    _causes(page, found)
    vain = [(a["switch"], a["because"]) for c in found["causes"][:1] for a in c["avoid"]]
    if vain:
        page["tables"].append(_table("What will not help", ("switch", "why"), vain))
    probes = [(p["probe"], units.factor(p["speedup"], _pair(p["interval"]))) for p in found.get("probes") or [] if p["turns"]]
    if probes:
        page["tables"].append(_table("Counterfactuals, measured in turns", ("what", "speedup"), probes, (1,)))


def _run(page: dict[str, Any], facts: Mapping[str, Any]) -> None:
    found = facts["run"]
    page["title"] = str(found["run_id"])
    now = found["breakdown"]
    page["answer"] = f"{units.seconds(now['step_s'])} a step over {units.count(now['steps'], 'step')}"
    page["place"] = ", ".join(f"{k} {v}" for k, v in found["machine"].items() if isinstance(v, (str, int)) and not isinstance(v, bool))
    _bars(page, {"a step": now})
    if facts.get("diagnosis"):
        page["second"] = facts["diagnosis"]["sentence"]
        _machine(page, {"": facts["diagnosis"]})
        _causes(page, facts["diagnosis"])
    rows = [(units.label(k), units.fact(k, v)) for k, v in found["metrics"].items()]
    page["tables"].append(
        _table("Result", (), [("memory peak", units.size(found["peak_bytes"])), ("warm-up", units.seconds(found["warmup_s"])), *rows])
    )
    _environment(page, {"environment": found["environment"], "fingerprint": found["fingerprint"]})


BUILDERS = {"tune": _tune, "verdict": _verdict, "verdicts": _verdicts, "diagnosis": _diagnosis, "run": _run}


# --- parts of a page ---
def _pair(raw: Sequence[float] | None) -> tuple[float, float] | None:
    return (raw[0], raw[1]) if raw and None not in raw else None


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]], numbers: Sequence[int] = ()) -> dict[str, Any]:
    return {"title": title, "head": head, "rows": [[str(cell) for cell in row] for row in rows], "numbers": numbers}


def _color(phase: str, order: Sequence[str]) -> str:
    own = [p for p in order if p not in LOOKS]
    return LOOKS[phase].color if phase in LOOKS else OWN_LOOKS[own.index(phase) % len(OWN_LOOKS)].color


def _bars(page: dict[str, Any], breakdowns: Mapping[str, Mapping[str, Any]]) -> None:
    """All bars on one scale: the longest step fills the width."""
    seen = dict.fromkeys(p for b in breakdowns.values() for p, s in b["phase_s"].items() if s)
    order = [p for p in (*PHASES[:-1], *(p for p in seen if p not in PHASES), PHASES[-1]) if p in seen]
    longest = max((b["step_s"] for b in breakdowns.values()), default=0.0)
    for name, b in breakdowns.items():
        parts = [
            {"width": f"{100 * b['phase_s'].get(p, 0.0) / longest:.2f}", "color": _color(p, order),
             "told": f"{units.label(p)} {units.milliseconds(b['phase_s'].get(p, 0.0))} ms"}
            for p in order
        ]  # fmt: skip
        label = ", ".join(str(p["told"]) for p in parts)
        page["bars"].append({"name": name, "told": f"{units.seconds(b['step_s'])} a step", "parts": parts, "label": label})
    for phase in order:
        cells = [
            f"{units.milliseconds(b['phase_s'].get(phase, 0.0))} ms ({units.share(b['phase_s'].get(phase, 0.0) / b['step_s'])})"
            for b in breakdowns.values()
        ]
        page["phase_rows"].append({"name": units.label(phase), "color": _color(phase, order), "cells": cells})


def _waterfall(page: dict[str, Any], found: Mapping[str, Any]) -> None:
    """What each kept switch took off the step, if all that it takes was measured."""
    kept = [(e["switch"], e["measured"], _pair(e["ci95"])) for e in found["ledger"] if e["kept"] and e["switch"] in found["kept"]]
    known = [(name, speedup, ci) for name, speedup, ci in kept if speedup and ci and min(ci) > 0]
    if not known or len(known) < len(kept) or not found.get("before"):
        return
    total = _pair(found.get("ci95"))
    bundle = (found["speedup"], total) if len(known) > 1 and total and min(total) > 0 else None
    page["charts"].append(charts.waterfall(found["before"]["breakdown"]["step_s"], known, bundle))


def _machine(page: dict[str, Any], diagnoses: Mapping[str, Mapping[str, Any]]) -> None:
    """How far from the machine's limits the program stands, and its memory, where that was measured."""
    drawn = [roofline({name: d.get("roofline") for name, d in diagnoses.items()})]
    drawn += [memory_timeline(d.get("memory") or {}, f"Memory in one step{', ' if name else ''}{name}") for name, d in diagnoses.items()]
    page["charts"] += [chart for chart in drawn if chart]


def _causes(page: dict[str, Any], diagnosis: Mapping[str, Any]) -> None:
    page["causes"] = list(_told_causes(diagnosis))


def _told_causes(diagnosis: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for cause in diagnosis["causes"]:
        head = cause["label"]
        if not diagnosis["healthy"]:
            head += f": {units.share(cause['share'])} of the step, at most {units.factor(cause['upper_bound'])} without it"
        tries = [f"{t.get('switch') or t.get('edit')} ({units.between(*t['predicted'])}): {t['because']}" for t in cause["try"]]
        yield {"head": head, "where": cause["where"], "evidence": cause["evidence"], "tries": tries}


def _environment(page: dict[str, Any], found: Mapping[str, Any]) -> None:
    flat = [(k, v) for k, v in _flat("", found.get("environment") or {}) if v not in (None, "", {}, [])]
    if found.get("fingerprint"):
        flat.append(("fingerprint", found["fingerprint"]))
    if flat:
        page["tables"].append(_table("Environment", (), flat))


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), inner)
    else:
        yield prefix, value
