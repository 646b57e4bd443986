"""``perftrain report``: one HTML page of a recorded run, or of what a verb wrote with ``--json``; a run's steps as a trace."""

from __future__ import annotations

import json
import re
import shlex
import webbrowser
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from perftrain.composing import config_dir
from perftrain.facts import SCHEMA, PerftrainError, RunRecord, StepRow
from perftrain.options import Line
from perftrain.report.html import page_of
from perftrain.report.jsonfile import run_json, verdict_from_json, write_text
from perftrain.report.markdown import ranking_markdown, tune_markdown, verdict_markdown
from perftrain.report.perfetto import trace_of
from perftrain.store import Store


def report_line(line: Line, watcher: Any) -> int:
    """Write the page beside what it is made of (or where ``--out`` says), the trace beside the page, and say where they are."""
    what = line.overrides[0]
    facts, rows, place = _facts(what, Path(line.flags.get("--runs", "runs")))
    if line.markdown:
        print(_markdown(facts), end="")
        return 0
    out = Path(line.flags.get("--out") or place)
    trace = trace_of(what, rows) if "--trace" in line.flags else None
    write_text(out, page_of(facts, version("perftrain"), rows))
    print(f"Report: {out}")
    if trace is not None:
        beside = Path(line.flags["--trace"] or out.with_name(f"{out.stem}-trace.json"))
        write_text(beside, trace)
        print(f"Trace: {beside} (open it at https://ui.perfetto.dev)")
    if line.open:
        webbrowser.open(out.resolve().as_uri())
    return 0


def _facts(what: str, runs: Path) -> tuple[Mapping[str, Any], list[StepRow], Path]:
    """The facts, the steps if it is a run, and where the page goes."""
    path = Path(what)
    if path.is_file():
        try:
            facts = json.loads(path.read_text())
            newer = int(facts["schema"]) > SCHEMA
        except (ValueError, KeyError, TypeError):
            raise PerftrainError(f"A report is made of a run or of a file written with --json; {what} is neither.") from None
        if newer:
            raise PerftrainError(f"{what} was written by a newer perftrain (schema {facts['schema']}); this one reads up to {SCHEMA}.")
        return facts, [], path.with_suffix(".html")
    if (path / "ranking.json").is_file():  # a sweep
        typed = (path / "command.txt").read_text().strip() if (path / "command.txt").is_file() else ""
        return {**json.loads((path / "ranking.json").read_text()), "again": typed}, [], path / "ranking.html"
    store = Store(runs)
    if not (runs / what).is_dir():
        known = ", ".join(r.run_id for r in store.runs()[:8]) or "none"
        raise PerftrainError(f"There is no run, sweep or file {what!r}. Runs in {runs}: {known}.")
    record = store.load(what)
    facts = {"schema": 1, "run": {**run_json(record), "again": _again(record)}}
    return facts, store.load_steps(what), runs / what / "report.html"


def _again(record: RunRecord) -> str:
    """What to type for the same baseline once more; empty for a run of the library or of a recipe that is not shipped."""
    recipe = record.workload.get("recipe") if record.role == "baseline" else None
    shipped = {f.stem: _fields(OmegaConf.to_container(OmegaConf.load(f))) for f in sorted(Path(config_dir(), "recipe").glob("*.yaml"))}
    name = next((n for n, own in shipped.items() if recipe and own["_target_"] == recipe.get("_target_")), None)
    if recipe is None or name is None:
        return ""
    changed = [f"recipe.{k}={_value(v)}" for k, v in _fields(recipe).items() if v != shipped[name].get(k)]
    return shlex.join(["python", "-m", "perftrain", f"recipe={name}", *changed])


def _value(value: Any) -> str:
    """As an override has it: a text with unusual characters in quotes."""
    return value if isinstance(value, str) and re.fullmatch(r"[\w./-]+", value) else json.dumps(value)


def _fields(node: Any, prefix: str = "") -> dict[str, Any]:
    """Every value by its whole name."""
    found: dict[str, Any] = {}
    for key, value in node.items():
        found |= _fields(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def _markdown(facts: Mapping[str, Any]) -> str:
    if facts.get("tune"):
        return tune_markdown(facts["tune"])
    if facts.get("verdicts"):
        return ranking_markdown([verdict_from_json(v) for v in facts["verdicts"]])
    if facts.get("verdict"):
        return verdict_markdown(verdict_from_json(facts["verdict"]))
    raise PerftrainError("--markdown is for verdicts, sweeps and tunings; the file holds none of them.")
