"""``perftrain diagnose``: watch a program, measure the counterfactuals that matter, rank the causes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from perftrain.attach.launch import Watched, folder_of, watch
from perftrain.attach.orders import Orders
from perftrain.diagnose.ranking import diagnose, wanted_probes
from perftrain.diagnose.seen import Seen, probes_of
from perftrain.facts import Diagnosis, PerftrainError
from perftrain.options import Line
from perftrain.report import terminal
from perftrain.report.diagnosis import print_diagnosis
from perftrain.report.jsonfile import diagnosis_json, write_json

LEAST_BUDGET_S = 20.0
START_LIMIT_S = 600.0
"""A program that has not trained a step by then is given up."""
Progress = Callable[[str, float, float], None]
"""What is done now, seconds spent on it, seconds it may take."""


class ScriptFailed(RuntimeError):
    """The program ended with an error of its own."""

    def __init__(self, code: int, said: str) -> None:
        super().__init__(f"the program ended with exit code {code} before it had trained enough steps to judge")
        self.code, self.said = code, said


def diagnose_program(
    program: Sequence[str], budget_s: float, progress: Progress, to_the_end: bool = False
) -> tuple[Diagnosis, Seen, dict[str, Any]]:
    """Diagnose a training program that knows nothing of perftrain.

    It runs once with its output as usual (ended early unless ``to_the_end``), and, if something is worth measuring, a
    second time without output and without saving, where counterfactuals take turns with the program as it is.

    Raises:
        PerftrainError: it is no Python program, or trained fewer than three steps.
        ScriptFailed: it failed by itself before that.
    """
    watched_s = min(25.0, max(6.0, 0.3 * budget_s))
    orders = Orders("", "", observe_s=min(10.0, 0.5 * watched_s), most_s=watched_s, to_the_end=to_the_end)
    first = watch(
        program, orders, lambda steps, s: progress(f"watching the program: {steps} steps", s, watched_s), START_LIMIT_S + watched_s
    )
    seen = _seen(first, program)
    spent = first.seconds
    wishes = wanted_probes(seen)
    runs = {"watched_s": first.seconds, "ended_early": first.ended_early, "code": first.code, "probe_error": ""}
    left = budget_s - spent - float(seen.process.get("first_step_s") or 0.0)
    if wishes and left > 5:
        probed, error = _probe(program, seen, wishes, left, progress)
        seen, runs["probe_error"] = replace(seen, probes=probed), error
    return diagnose(seen), seen, runs


def _seen(watched: Watched, program: Sequence[str]) -> Seen:
    if not watched.processes or len(watched.processes[0]["rows"]) < 5:
        steps = len(watched.processes[0]["rows"]) if watched.processes else 0
        if watched.code:
            raise ScriptFailed(watched.code, watched.error)
        raise PerftrainError(
            f"A diagnosis needs at least 5 training steps (an optimizer of torch that steps); {program[0]!r} made "
            f"{steps} in {watched.seconds:.0f} s. "
            "Give it more steps or a higher --budget."
        )
    return Seen(watched.processes[0], watched.fetchers, watched.processes[1:], folder=folder_of(program))


def _probe(program: Sequence[str], seen: Seen, wishes: Sequence[str], left_s: float, progress: Progress) -> tuple[dict[str, Any], str]:
    """Run the program again with counterfactuals in turns. A probe that breaks it is left out, and the rest tried once more."""
    wishes = list(wishes)
    while wishes:
        orders = _turns(seen, wishes, left_s)
        extra = 60.0 if "compile" in wishes else 15.0
        limit = float(seen.process.get("first_step_s") or 0.0) + orders.probe_s + extra
        what = f"taking turns: {', '.join(n.replace('_', ' ') for n in wishes)}"
        again = watch(program, orders, partial(_tell, progress, what, orders.probe_s), limit, quiet=True)
        found = probes_of(again.processes[0], wishes) if again.processes else {}
        if found or not again.code:
            return found, "" if not again.code else again.error
        kinds = again.processes[0].get("kinds", []) if again.processes else []
        broke = next((k for k in reversed(kinds) if k in wishes), wishes[-1])
        wishes.remove(broke)
    return {}, "the program did not run with any of the counterfactuals"


def _tell(progress: Progress, what: str, may_s: float, _: int, seconds: float) -> None:
    progress(what, seconds, may_s)


def _turns(seen: Seen, wishes: Sequence[str], left_s: float) -> Orders:
    """How long each turn is: some tenths of a second, but short enough that a short program has several of each."""
    usual = sorted(seen.step_times())[len(seen.window) // 2] if seen.window else 0.1
    by_time = max(2, round(0.25 / max(1e-4, usual)))
    probe_s = min(left_s, max(8.0, 5.0 * len(wishes), 10 * len(wishes) * usual * 2))
    steps = int(probe_s / max(1e-4, usual))
    if not seen.process.get("ended_early", True):
        steps = min(steps, len(seen.process["rows"]))
    by_steps = max(1, steps // (10 * len(wishes)) - 1)
    return Orders("", "", probes=tuple(wishes), probe_s=probe_s, block_steps=max(1, min(by_time, by_steps)), trace=False, saving=False)


# --- the verb ---
def diagnose_line(line: Line, watcher: Any) -> int:
    """``perftrain diagnose``: what rules the program, printed and as JSON."""
    from pathlib import Path

    budget_s = float(line.flags.get("--budget", 90))
    if budget_s < LEAST_BUDGET_S:
        raise PerftrainError(f"A diagnosis takes {LEAST_BUDGET_S:.0f} s at least; --budget was {budget_s:g}. Try --budget 90.")
    json_path = line.flags.get("--json")
    if json_path and not Path(json_path).parent.is_dir():
        folder = Path(json_path).parent
        raise PerftrainError(f"A JSON file needs an existing folder; {str(folder)!r} is none. Type: mkdir -p {folder}")
    program = line.program or recipe_program(line)
    said: list[str] = []

    def tell(what: str, spent_s: float, may_s: float) -> None:
        head = what.partition(":")[0]
        if head not in said:
            said.append(head)
            watcher.say(f"perftrain: {head} (about {may_s:.0f} s)")

    diagnosis, seen, runs = diagnose_program(program, budget_s, tell, line.full)
    console = terminal.stdout_console()
    console.rule(style="dim")
    name = " ".join(line.program) if line.program else f"recipe {' '.join(line.overrides) or '(the default)'}"
    place = f"{seen.process.get('device')} · {seen.cores} cores, {seen.threads} threads · torch {seen.process.get('torch')}" + (
        f" · {seen.ranks} ranks" if seen.ranks > 1 else ""
    )
    notes = []
    if runs["ended_early"]:
        notes.append(f"The program was ended after {len(seen.process['rows'])} steps: that was enough to see (--full lets it finish).")
    if runs["probe_error"]:
        notes.append("A run with counterfactuals failed: " + str(runs["probe_error"]).strip().splitlines()[-1])
    print_diagnosis(console, name, place, diagnosis, notes)
    if json_path:
        write_json(
            json_path, {"schema": 1, "diagnosis": {**diagnosis_json(diagnosis), "program": list(program), "probes": _probes_json(seen)}}
        )
    return 1 if runs["code"] else 0


def _probes_json(seen: Seen) -> list[dict[str, Any]]:
    return [
        {"probe": p.name, "speedup": p.speedup, "interval": [p.low, p.high], "turns": p.blocks, "error": p.error}
        for p in seen.probes.values()
    ]


def recipe_program(line: Line) -> tuple[str, ...]:
    """A recipe as a program: it is diagnosed like any other."""
    from perftrain.options import as_overrides, check

    own = replace(line, flags={k: v for k, v in line.flags.items() if k == "--config-dir"})
    check(own)  # a mistyped name is told before anything runs
    return ("-m", "perftrain.recipe_program", *as_overrides(own))
