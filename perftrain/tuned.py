"""``perftrain try`` and ``perftrain tune`` on somebody's own script."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perftrain.attach.facts_of import cores
from perftrain.attach.launch import command_of
from perftrain.compare.duet import Protocol
from perftrain.compare.script import NOTHING, Asked, possible, sort_switches, try_on_script
from perftrain.diagnosed import Telling, diagnose_program, json_path
from perftrain.facts import Diagnosis, PerftrainError, Verdict
from perftrain.options import Line
from perftrain.report import terminal
from perftrain.report.jsonfile import verdict_from_json, verdict_json, write_json
from perftrain.report.tuning import print_tuned, tune_json
from perftrain.tune.search import Settings, Switches, tune


def try_line(line: Line, watcher: Any) -> int:
    """``perftrain try SWITCHES train.py``: the verdict, printed and as JSON."""
    path = json_path(line)
    asked = sort_switches([w for w in line.overrides[0].strip("[]").split(",") if w], cores())
    command_of(line.program)  # no such script: said before anything runs
    protocol = Protocol(budget_s=float(line.flags.get("--budget", Protocol.budget_s)))
    verdict = try_on_script(line.program, asked, protocol, Telling(watcher))
    console = terminal.stdout_console()
    console.rule(style="dim")
    terminal.print_verdict(console, verdict)
    if path:
        write_json(path, {"schema": 1, "verdict": verdict_json(verdict)})
    return 0


class ScriptFront:
    """A script as the closed loop sees it. Verdicts are kept on disk, so that a stopped loop goes on where it was."""

    def __init__(self, program: Sequence[str], protocol: Protocol, diagnosis_s: float, ledger: Path, tell: Telling) -> None:
        self.program, self.protocol, self.diagnosis_s, self.tell = program, protocol, diagnosis_s, tell
        self.ledger = ledger
        self.known: dict[str, Any] = json.loads(ledger.read_text()) if ledger.exists() else {}
        self.reused = 0

    def diagnose(self, kept: Switches) -> Diagnosis:
        self.tell.forget()
        return diagnose_program(self.program, self.diagnosis_s, self.tell, base=self._asked(kept))[0]

    def compare(self, base: Switches, more: Switches) -> Verdict:
        key = f"{'+'.join(base)} | {'+'.join(more)}"
        if key in self.known:
            self.reused += 1
            return verdict_from_json(self.known[key])
        self.tell.forget()
        verdict = try_on_script(self.program, self._asked(more), self.protocol, self.tell, self._asked(base))
        self.known[key] = verdict_json(verdict)
        self.ledger.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.ledger, self.known)
        return verdict

    def refuse(self, switch: str, kept: Switches) -> str:
        try:
            asked = self._asked((switch,))
        except PerftrainError as error:
            return str(error)
        on = {k.partition("=")[0] for k in kept}
        return f"{switch} is on already" if set(asked.names) & on else ""

    def neighbours(self, switch: str) -> Sequence[str]:
        name, _, value = switch.partition("=")
        if name == "workers":
            now = int(value or max(2, cores()))
            return [f"workers={n}" for n in (now * 2, now * 4) if n <= 16]
        return []

    def _asked(self, switches: Switches) -> Asked:
        return sort_switches(switches, cores()) if switches else NOTHING


def ledger_path(runs: str, program: Sequence[str]) -> Path:
    """Belongs to this program, its arguments and its source as it is now."""
    source = Path(program[0]).read_bytes() if Path(program[0]).is_file() else b""
    key = hashlib.sha256(repr(tuple(program)).encode() + source).hexdigest()[:12]
    return Path(runs) / "tune" / f"{key}.json"


def tune_line(line: Line, watcher: Any) -> int:
    """``perftrain tune train.py``: the closed loop, printed and as JSON."""
    path = json_path(line)
    command_of(line.program)
    settings = tune_settings(line)
    tell = Telling(watcher)
    protocol = Protocol(budget_s=min(45.0, settings.budget_s / 10))
    ledger = ledger_path(line.flags.get("--runs", "runs"), line.program)
    front = ScriptFront(line.program, protocol, min(60.0, max(20.0, settings.budget_s / 8)), ledger, tell)
    if front.known:
        watcher.say(f"perftrain: {len(front.known)} comparisons are known from {ledger} and will be reused")
    found = tune(front, settings, lambda said: watcher.say(f"perftrain: {said}"))
    console = terminal.stdout_console()
    console.rule(style="dim")
    print_tuned(console, " ".join(line.program), found)
    if path:
        write_json(path, {"schema": 1, "tune": tune_json(found)})
    return 0


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


__all__ = ["ScriptFront", "possible", "try_line", "tune_line"]
