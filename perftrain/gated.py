"""``perftrain gate``: an exit code for continuous integration."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from perftrain.attach.launch import command_of
from perftrain.compare.gate import Gate, against_revision, against_stored, record
from perftrain.diagnosed import Telling, json_path
from perftrain.facts import PerftrainError
from perftrain.options import Line
from perftrain.report import units
from perftrain.report.jsonfile import write_json

SLOWER = 3
"""The exit code."""
MIN_EFFECT = 0.02


def gate_line(line: Line, watcher: Any) -> int:
    """Record timings if there are none yet; else compare, print, and return 0 or 3."""
    path = json_path(line)
    command_of(line.program)
    budget_s = float(line.flags.get("--budget", 60))
    tell = Telling(watcher)
    if revision := line.flags.get("--against"):
        gate = against_revision(line.program, revision, budget_s, MIN_EFFECT, tell)
        what = revision
    else:
        file = Path(line.flags["--baseline"])
        if not file.parent.is_dir():
            raise PerftrainError(f"--baseline needs an existing folder; {str(file.parent)!r} is none. Type: mkdir -p {file.parent}")
        if not file.exists():
            stored = record(line.program, budget_s, tell)
            write_json(file, {"schema": 1, "gate_baseline": stored})
            print(
                f"Recorded: {len(stored['step_s'])} runs, {units.seconds(sum(stored['step_s']) / len(stored['step_s']))} a step, in {file}"
            )
            return 0
        gate = against_stored(line.program, _stored(file), budget_s, MIN_EFFECT, tell)
        what = str(file)
    print(_sentence(gate, what))
    if path:
        write_json(path, {"schema": 1, "gate": asdict(gate)})
    return SLOWER if gate.slower else 0


def _stored(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text())
        if raw["schema"] > 1:
            raise PerftrainError(f"{file} was written by a newer perftrain (schema {raw['schema']}); this one reads 1.")
        return raw["gate_baseline"]
    except (ValueError, KeyError, TypeError) as error:
        raise PerftrainError(f"{file} is no baseline of perftrain gate ({error}). Delete it to record a new one.") from None


def _sentence(gate: Gate, what: str) -> str:
    change = f"a step takes {gate.slowdown:.3f} times as long as with {what} [{gate.low:.3f}, {gate.high:.3f}], {gate.runs} runs"
    if gate.slower:
        return f"SLOWER: {change}"
    return f"NOT SLOWER: {change}; a slowdown over {units.share(gate.resolution)} would have been seen"
