"""``perftrain try`` and ``perftrain tune`` on somebody's own script."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from perftrain.attach.launch import command_of
from perftrain.compare.duet import Protocol
from perftrain.compare.gate import against_copy
from perftrain.compare.script import Asked, NotFromOutside, ScriptFailed, apply, sort_switches, try_on_script
from perftrain.composing import check
from perftrain.cores import usable_cores
from perftrain.diagnosed import Telling, again, json_path
from perftrain.facts import PerftrainError
from perftrain.fronts import RecipeFront, ScriptFront
from perftrain.options import Line, as_overrides, typed_flags
from perftrain.report import terminal
from perftrain.report.jsonfile import verdict_json, write_json, write_text
from perftrain.report.tuning import print_edits, print_tuned, tune_json
from perftrain.tune.by_hand import place_in
from perftrain.tune.edits import edit_script
from perftrain.tune.search import Settings, tune


def try_line(line: Line, watcher: Any) -> int:
    """``perftrain try SWITCHES train.py``: the verdict, printed and as JSON."""
    path = json_path(line)
    command_of(line.program)  # no such script: said before anything runs
    asked = asked_of(line)
    if line.full:
        return 1 if apply(line.program, asked) else 0
    protocol = Protocol(budget_s=float(line.flags.get("--budget", Protocol.budget_s)))
    verdict = try_on_script(line.program, asked, protocol, Telling(watcher))
    console = terminal.stdout_console()
    console.rule(style="dim")
    terminal.print_verdict(console, verdict)
    if path:
        typed = again("try", line.overrides[0], *line.program)
        write_json(path, {"schema": 1, "verdict": {**verdict_json(verdict), "again": typed}})
    return 0


def asked_of(line: Line) -> Asked:
    """The switches that were typed; one that needs an edit is refused with the line to edit."""
    try:
        return sort_switches([w for w in line.overrides[0].strip("[]").split(",") if w], usable_cores())
    except NotFromOutside as error:
        script = Path(line.program[0])
        found = place_in(script.read_text(), error.card) if script.is_file() else None
        if found is None:
            raise
        raise PerftrainError(
            f"{error} What it does: {error.card.summary}. By hand it belongs at {script.name}:{found[0]}: {found[1]}"
        ) from None


def ledger_path(runs: str, program: Sequence[str]) -> Path:
    """Belongs to this program, its arguments and its source as it is now."""
    source = Path(program[0]).read_bytes() if Path(program[0]).is_file() else b""
    key = hashlib.sha256(repr(tuple(program)).encode() + source).hexdigest()[:12]
    return Path(runs) / "tune" / f"{key}.json"


def tune_line(line: Line, watcher: Any) -> int:
    """``perftrain tune``: the closed loop on a script or a recipe, printed and as JSON."""
    path = json_path(line)
    if line.program:
        command_of(line.program)
    settings = tune_settings(line) if line.program else None
    front, settings, name = _script(line, watcher, settings) if settings else _recipe(line, watcher)
    found = tune(front, settings, lambda said: watcher.say(f"perftrain: {said}"))
    runs = Path(line.flags.get("--runs", "runs"))
    edited = write_edits(line.program, found.kept, runs, front.device, Telling(watcher)) if line.program and found.kept else None
    console = terminal.stdout_console()
    console.rule(style="dim")
    print_tuned(console, name, found)
    facts: dict[str, Any] = {"schema": 1, "tune": tune_json(found, name, again("tune", *typed_flags(line), *line.overrides, *line.program))}
    if edited is not None:
        print_edits(console, edited)
        facts["tune"]["edit"] = edited
    elif found.kept:
        facts["tune"]["tuned_yaml"] = write_overrides(found.kept, runs)
        watcher.say(f"perftrain: the kept switches as overrides: {facts['tune']['tuned_yaml']}")
    kept = runs / "tune" / f"{hashlib.sha256(name.encode()).hexdigest()[:12]}-result.json"
    kept.parent.mkdir(parents=True, exist_ok=True)
    write_json(kept, facts)
    watcher.say(f"perftrain: kept in {kept}; a page of it: perftrain report {kept}")
    if path:
        write_json(path, facts)
    return 0


def write_edits(program: Sequence[str], kept: Sequence[str], runs: Path, device: str, tell: Telling) -> dict[str, Any] | None:
    """The kept switches written for ``device`` into a copy of the script, which is measured against the script as it is."""
    if program[0] == "-m":
        return None
    script = Path(program[0])
    found = edit_script(script.read_text(), kept, script.name, device)
    folder = runs / "tune" / ledger_path(str(runs), program).stem
    folder.mkdir(parents=True, exist_ok=True)
    copy, diff = folder / script.name, folder / f"{script.stem}.diff"
    write_text(copy, found.source)
    write_text(diff, found.diff)
    edited: dict[str, Any] = {"diff": str(diff), "copy": str(copy), "text": found.diff, "by_hand": list(found.by_hand), "proof": None}
    if found.diff:
        try:
            gate = against_copy([str(script), *program[1:]], [str(copy), *program[1:]], 40.0, 0.02, tell)
            edited["proof"] = {"speedup": 1 / gate.slowdown, "ci95": [1 / gate.high, 1 / gate.low], "runs": gate.runs}
        except ScriptFailed as error:
            edited["proof_failed"] = str(error)
    return edited


def write_overrides(kept: Sequence[str], runs: Path) -> str:
    """``tuned.yaml``: the kept switches as the ``opt`` part of a configuration."""
    numbers = RecipeFront.NUMBERS
    lines = ["# Written by perftrain tune; the same as overrides:", f"#   +opt=[{','.join(k.partition('=')[0] for k in kept)}]", "opt:"]
    for name, _, value in (k.partition("=") for k in kept):
        lines += [f"  {name}:", f"    {numbers[name]}: {value}"] if value else [f"  {name}: {{}}"]
    path = runs / "tune" / "tuned.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "\n".join(lines) + "\n")
    return str(path)


def _script(line: Line, watcher: Any, settings: Settings) -> tuple[ScriptFront, Settings, str]:
    protocol = Protocol(budget_s=min(45.0, settings.budget_s / 10))
    ledger = ledger_path(line.flags.get("--runs", "runs"), line.program)
    front = ScriptFront(line.program, protocol, diagnosis_s(settings), ledger, Telling(watcher))
    if front.known:
        watcher.say(f"perftrain: {len(front.known)} comparisons are known from {ledger} and will be reused")
    return front, settings, " ".join(line.program)


def _recipe(line: Line, watcher: Any) -> tuple[RecipeFront, Settings, str]:
    from perftrain import measured

    budget = {"--budget": "tune.budget_s"}
    own = [f"{budget[k]}={v}" for k, v in line.flags.items() if k in budget]
    rest = replace(line, flags={k: v for k, v in line.flags.items() if k not in (*budget, "--json")}, overrides=(*line.overrides, *own))
    cfg = check(rest)[0]
    if cfg.get("opt"):
        raise PerftrainError("tune looks for switches by itself; +opt=... was given. Type: perftrain tune recipe=photos.")
    settings = measured.build(cfg.tune, "tune")
    job = measured.job_of(cfg)
    job = replace(
        job, protocol=replace(job.protocol, budget_s=min(job.protocol.budget_s, settings.budget_s / 15), resolution=settings.min_gain)
    )
    baseline = measured.ensure_baseline(job, job.parts(), watcher)
    words = [
        o
        for o in as_overrides(replace(rest, flags={k: v for k, v in rest.flags.items() if k == "--config-dir"}))
        if not o.startswith("tune.")
    ]
    front = RecipeFront(job, baseline.record, words, diagnosis_s(settings), watcher, Telling(watcher))
    return front, settings, " ".join(words) or "the default recipe"


def diagnosis_s(settings: Settings) -> float:
    """Seconds for each diagnosis within the loop."""
    return min(60.0, max(20.0, settings.budget_s / 10))


def tune_settings(line: Line) -> Settings:
    """From ``tune.min_gain=...`` and ``tune.allow_changed=true`` before the script, and ``--budget``."""
    values: dict[str, Any] = {"budget_s": float(line.flags.get("--budget", 600))}
    for word in line.overrides:
        name, _, value = word.partition("=")
        if name == "tune.min_gain":
            values["min_gain"] = float(value)
        elif name == "tune.allow_changed":
            values["allow_changed"] = value.lower() == "true"
        else:
            raise PerftrainError(f"Before the script come tune.min_gain=0.02 and tune.allow_changed=true only; {word!r} is neither.")
    return Settings(**values)
