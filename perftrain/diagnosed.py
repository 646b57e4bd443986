"""``perftrain diagnose``: watch a program, measure the counterfactuals that matter, rank the causes."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from perftrain import nsight
from perftrain.attach.launch import Watched, folder_of, watch
from perftrain.attach.orders import Orders
from perftrain.compare.script import NOTHING, Asked, ScriptFailed, saying
from perftrain.composing import check
from perftrain.data.user_cache import cache_folder
from perftrain.diagnose.input_rules import without_loading
from perftrain.diagnose.memory import memory_facts
from perftrain.diagnose.probe import Probe, probes_of
from perftrain.diagnose.ranking import HEALTHY_BELOW, diagnose, wanted_probes
from perftrain.diagnose.roofline import roofline
from perftrain.diagnose.seen import Seen
from perftrain.diagnose.trace_file import read_trace
from perftrain.facts import Diagnosis, PerftrainError
from perftrain.measure.known_peaks import known_peaks
from perftrain.measure.machine import describe, machine_id
from perftrain.options import NSIGHT_FLAGS, Line, as_overrides
from perftrain.report import terminal
from perftrain.report.diagnosis import print_diagnosis
from perftrain.report.jsonfile import diagnosis_json, write_json

LEAST_BUDGET_S = 20.0
START_LIMIT_S = 600.0
"""A program that has not trained a step by then is given up."""
PEAKS_TAKE_S = 6.0
RUNS_DIFFER = 1.08
"""Two runs of the same program differ by so much (benchmarks/measuring/scatter.py)."""
Progress = Callable[[str, float, float], None]
"""What is done now, seconds spent on it, seconds it may take."""


def diagnose_program(
    program: Sequence[str], budget_s: float, progress: Progress, to_the_end: bool = False, base: Asked = NOTHING, quiet: bool = False
) -> tuple[Diagnosis, Seen, dict[str, Any]]:
    """Diagnose a training program that knows nothing of perftrain.

    It runs once with its output as usual (ended early unless ``to_the_end``), and, if something is worth measuring, a
    second time without output and without saving, where counterfactuals take turns with the program as it is. ``base``: switches
    that are on in all of this (then the first run is silent too).

    Raises:
        PerftrainError: it is no Python program, or trained fewer than three steps.
        ScriptFailed: it failed by itself before that.
    """
    watched_s = min(25.0, max(6.0, 0.3 * budget_s))
    orders = base.orders(Orders(observe_s=min(10.0, 0.5 * watched_s), most_s=watched_s, to_the_end=to_the_end, saving=not base.names))
    began_s = time.monotonic()
    first = watch(
        program, orders, lambda steps, s: progress(f"watching the program: {steps} steps", s, watched_s), START_LIMIT_S + watched_s,
        quiet=quiet or bool(base.names), environment=dict(base.environment),
    )  # fmt: skip
    seen = _seen(first, program)
    spent = first.seconds
    wishes = wanted_probes(seen)
    runs = {"watched_s": first.seconds, "ended_early": first.ended_early, "code": first.code, "probe_error": ""}
    left = budget_s - spent - float(seen.process.get("first_step_s") or 0.0)
    if wishes and left > 5:
        fewer = _fewer_threads(program, seen, progress) if "threads" in wishes and seen.threads > seen.cores else {}
        wishes = tuple(w for w in wishes if w not in fewer)
        horizon = None if first.ended_early else len(seen.process["rows"])
        began = time.monotonic()
        probed, error = _probe(program, seen, wishes, left, progress, base, horizon)
        seen, runs["probe_error"] = replace(seen, probes={**probed, **fewer}), error
        if tuple(wishes) == ("cached_batches",) and (more := wanted_probes(seen)) and without_loading(seen) < HEALTHY_BELOW:
            left -= time.monotonic() - began
            again, _ = _probe(program, seen, more, left, progress, base, horizon) if left > 5 else ({}, "")
            seen = replace(seen, probes={**seen.probes, **again})
    if seen.computing and budget_s - (time.monotonic() - began_s) > PEAKS_TAKE_S:
        progress("measuring what this machine can do at most", 0.0, PEAKS_TAKE_S)
        seen = replace(seen, peaks=_peaks(seen))
    return replace(diagnose(seen), memory=memory_facts(seen), roofline=roofline(seen)), seen, runs


def _peaks(seen: Seen) -> dict[str, Any]:
    """Measured once for a machine, its torch and a number of threads; kept in the user's cache."""
    name = f"{machine_id(describe())}-{seen.process['device']}-{seen.threads}-{seen.process['torch']}.json"
    return known_peaks(cache_folder() / "peaks" / name, str(seen.process["device"]), seen.threads)


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


def _probe(
    program: Sequence[str], seen: Seen, wishes: Sequence[str], left_s: float, progress: Progress, base: Asked, horizon: int | None
) -> tuple[dict[str, Any], str]:
    """Run the program again with counterfactuals in turns. A probe that breaks it is left out, and the rest tried once more."""
    wishes = list(wishes)
    while wishes:
        orders = base.orders(_turns(seen, wishes, left_s, horizon))
        limit = float(seen.process.get("first_step_s") or 0.0) + orders.probe_s + (60.0 if "compile" in wishes else 15.0)
        what = f"taking turns: {', '.join(n.replace('_', ' ') for n in wishes)}"
        say = saying(progress, what, orders.probe_s)
        again = watch(program, orders, say, limit, quiet=True, environment=dict(base.environment))
        found = probes_of(again.processes[0], wishes) if again.processes else {}
        if found or not again.code:
            return found, ""
        kinds = again.processes[0].get("kinds", []) if again.processes else []
        broke = next((k for k in reversed(kinds) if k in wishes), wishes[-1])
        wishes.remove(broke)
    return {}, "the program did not run with any of the counterfactuals"


def _fewer_threads(program: Sequence[str], seen: Seen, progress: Progress) -> dict[str, Probe]:
    """More threads than cores: a pool that was once that large cannot be judged in turns, so a whole run is."""
    orders = Orders(observe_s=5.0, most_s=10.0, trace=False, saving=False, threads=seen.cores)
    again = watch(program, orders, saying(progress, f"with {seen.cores} threads", 5.0), START_LIMIT_S, quiet=True)
    if not again.processes or len(again.processes[0]["rows"]) < 5:
        return {}
    speedup = seen.step_s / Seen(again.processes[0]).step_s
    return {"threads": Probe("threads", speedup, speedup / RUNS_DIFFER, speedup * RUNS_DIFFER, 1)}


def _turns(seen: Seen, wishes: Sequence[str], left_s: float, horizon: int | None) -> Orders:
    """How long each turn is: some tenths of a second, but short enough that a short program has several of each."""
    usual = sorted(seen.step_times())[len(seen.window) // 2] if seen.window else 0.1
    by_time = max(2, round(0.25 / max(1e-4, usual)))
    probe_s = min(left_s, max(8.0, 5.0 * len(wishes), 10 * len(wishes) * usual * 2))
    steps = int(probe_s / max(1e-4, usual))
    if horizon is not None:  # the program is that short
        steps = min(steps, horizon)
    by_steps = max(1, steps // (10 * len(wishes)) - 1)
    return Orders(probes=tuple(wishes), probe_s=probe_s, block_steps=max(1, min(by_time, by_steps)), trace=False, saving=False)


# --- the verbs ---
class Telling:
    """Each new thing that is done is said once, on standard error: standard output may be the program's."""

    def __init__(self, watcher: Any) -> None:
        self._watcher, self._said = watcher, set[str]()

    def forget(self) -> None:
        """Another measurement begins: say everything once more."""
        self._said.clear()

    def __call__(self, what: str, spent_s: float, may_s: float) -> None:
        head = what.partition(":")[0]
        if head not in self._said:
            self._said.add(head)
            self._watcher.say(f"perftrain: {head} (about {may_s:.0f} s)")


def json_path(line: Line) -> str | None:
    """Where the facts go; refused now, not after minutes of measuring."""
    path = line.flags.get("--json")
    if path and not Path(path).parent.is_dir():
        folder = Path(path).parent
        raise PerftrainError(f"A JSON file needs an existing folder; {str(folder)!r} is none. Type: mkdir -p {folder}")
    return path


def diagnose_line(line: Line, watcher: Any) -> int:
    """``perftrain diagnose``: what rules the program, printed and as JSON."""
    budget_s = float(line.flags.get("--budget", 90))
    if budget_s < LEAST_BUDGET_S:
        raise PerftrainError(f"A diagnosis takes {LEAST_BUDGET_S:.0f} s at least; --budget was {budget_s:g}. Try --budget 90.")
    path = json_path(line)
    if trace := line.flags.get("--trace"):
        return _of_a_report("--trace", trace, read_trace(Path(trace)), path)
    flag = next((f for f in NSIGHT_FLAGS if f in line.flags), "")
    if flag and (report := line.flags[flag]):
        return _of_a_report(flag, report, nsight.read_report(flag, Path(report)), path)
    program = line.program or recipe_program(line)
    if flag:
        diagnosis, seen, runs = _under_nsight(flag, line, program, Telling(watcher))
    else:
        diagnosis, seen, runs = diagnose_program(program, budget_s, Telling(watcher), line.full)
    console = terminal.stdout_console()
    console.rule(style="dim")
    name = " ".join(line.program) if line.program else " ".join(line.overrides) or "the default recipe"
    place = place_of(seen) if seen.process["pid"] else f"{seen.process['device']} · {_extent(seen)}"
    print_diagnosis(console, name, place, diagnosis, _notes(seen, runs))
    if path:
        typed = [flag] * bool(flag) + list(line.program or line.overrides)
        facts = {**diagnosis_json(diagnosis), "program": list(program), "probes": _probes_json(seen), "again": again("diagnose", *typed)}
        write_json(path, {"schema": 1, "diagnosis": facts})
    return 1 if runs["code"] else 0


def _of_a_report(flag: str, name: str, seen: Seen, path: str | None) -> int:
    diagnosis = diagnose(seen)
    print_diagnosis(terminal.stdout_console(), name, f"{seen.process['device']} · {_extent(seen)}", diagnosis)
    if path:
        write_json(
            path,
            {
                "schema": 1,
                "diagnosis": {**diagnosis_json(diagnosis), "program": [name], "probes": [], "again": again("diagnose", flag, name)},
            },
        )
    return 0


def again(verb: str, *words: str) -> str:
    """The command that does the same once more."""
    return shlex.join(["perftrain", verb, *words])


def _extent(seen: Seen) -> str:
    if "bound_s" in seen.trace:
        return f"{seen.trace['device_calls']:,} kernels measured one by one"
    if seen.trace.get("steps_from") == "":
        return "no steps are marked: the whole report counts as one (torch.cuda.nvtx.range_push('step 1') marks one)"
    return f"{seen.trace['steps']} steps traced"


def _under_nsight(flag: str, line: Line, program: Sequence[str], progress: Progress) -> tuple[Diagnosis, Seen, dict[str, Any]]:
    """The program once, under nsys or ncu: phases and lines as always, and the device's timeline; of ncu only the kernels."""

    def say(steps: int, seconds: float) -> None:
        progress(f"under {nsight.TOOLS[flag].name}: {steps} steps", seconds, nsight.START_LIMIT_S)

    watched, report = nsight.profiled(flag, program, say, line.full)
    runs = {"ended_early": watched.ended_early, "code": watched.code, "probe_error": ""}
    if flag == "--ncu":
        return diagnose(report), report, runs
    seen = _seen(watched, program)
    seen = replace(seen, process={**seen.process, "trace": {**seen.trace, **report.trace}})
    if seen.trace["float32_s"] > 0.2 * seen.trace["wall_s"]:
        seen = replace(seen, peaks=_peaks(seen))
    return replace(diagnose(seen), memory=memory_facts(seen)), seen, runs


def place_of(seen: Seen) -> str:
    """Where the program ran, in one line."""
    ranks = f" · {seen.ranks} ranks" if seen.ranks > 1 else ""
    return f"{seen.process.get('device')} · {seen.cores} cores, {seen.threads} threads · torch {seen.process.get('torch')}{ranks}"


def _notes(seen: Seen, runs: dict[str, Any]) -> list[str]:
    notes = []
    if runs["ended_early"]:
        notes.append(f"The program was ended after {len(seen.process['rows'])} steps: that was enough to see (--full lets it finish).")
    if runs["code"]:
        notes.append(f"The program ended with exit code {runs['code']}.")
    if runs["probe_error"]:
        notes.append("A run with counterfactuals failed: " + str(runs["probe_error"]).strip().splitlines()[-1])
    return notes


def _probes_json(seen: Seen) -> list[dict[str, Any]]:
    return [
        {"probe": p.name, "speedup": p.speedup, "interval": [p.low, p.high], "turns": p.blocks, "error": p.error}
        for p in seen.probes.values()
    ]


def recipe_program(line: Line) -> tuple[str, ...]:
    """A recipe as a program: it is diagnosed like any other."""
    own = replace(line, flags={k: v for k, v in line.flags.items() if k == "--config-dir"})
    check(own)  # a mistyped name is told before anything runs
    return ("-m", "perftrain.recipe_program", *as_overrides(own))
