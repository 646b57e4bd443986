"""Is the program slower than it was? Against stored timings of the same machine, or against an older revision beside it."""

from __future__ import annotations

import math
import os
import random
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perftrain.attach.launch import watch
from perftrain.attach.orders import Orders
from perftrain.compare.script import START_LIMIT_S, ScriptFailed, saying
from perftrain.diagnose.seen import Seen
from perftrain.facts import PerftrainError
from perftrain.measure import machine
from perftrain.measure.statistics import estimate

RUNS = 5
SESSIONS_DIFFER = 0.02
"""Standard error that no repetition within a session removes: the same machine on another day (log of the step time)."""
Tell = Callable[[str, float, float], None]


@dataclass(frozen=True)
class Gate:
    """The answer: ``slowdown`` = new step time / old step time, with its interval."""

    slowdown: float
    low: float
    high: float
    resolution: float
    """The smallest slowdown that would have been seen."""
    runs: int
    slower: bool


def run_step_s(program: Sequence[str], each_s: float, tell: Tell, what: str, folder: str | None = None, modules: str = "") -> float:
    """Mean seconds of a step in one fresh run; ``modules``: a further folder to import from."""
    orders = Orders(trace=False, observe_s=each_s, least_steps=20, most_s=3 * each_s, saving=False)
    path = os.pathsep.join(filter(None, [modules, os.environ.get("PYTHONPATH", "")]))
    environment = {"PYTHONPATH": path} if modules else {}
    say = saying(tell, what, each_s)
    found = watch(program, orders, say, START_LIMIT_S, quiet=True, environment=environment, folder_of_program=folder)
    if not found.processes or len(found.processes[0]["rows"]) < 8:
        raise ScriptFailed(found.code, found.error)
    return Seen(found.processes[0]).step_s


def identity(program: Sequence[str]) -> dict[str, Any]:
    """What stored timings belong to."""
    described, software = machine.describe(), machine.software()
    return {
        "program": list(program),
        "machine": machine.machine_id(described),
        "cpu": described.get("cpu_model"),
        "torch": software.get("torch"),
    }


def record(program: Sequence[str], budget_s: float, tell: Tell) -> dict[str, Any]:
    """Timings of several fresh runs, to be stored."""
    each_s = max(3.0, budget_s / RUNS)
    times = [run_step_s(program, each_s, tell, f"run {i + 1} of {RUNS}") for i in range(RUNS)]
    return {**identity(program), "step_s": times}


def against_stored(program: Sequence[str], stored: Mapping[str, Any], budget_s: float, min_effect: float, tell: Tell) -> Gate:
    """New runs against stored ones.

    Raises:
        PerftrainError: the stored ones are of another machine, torch or program.
    """
    now = identity(program)
    for key, value in now.items():
        if stored.get(key) != value:
            raise PerftrainError(
                f"Timings may only be compared on the same machine and software; {key} was {stored.get(key)!r} and is {value!r}. "
                "Delete the file to record a new baseline, or use --against REVISION."
            )
    return judged_apart(record(program, budget_s, tell)["step_s"], stored["step_s"], min_effect)


def against_copy(program: Sequence[str], copy: Sequence[str], budget_s: float, min_effect: float, tell: Tell) -> Gate:
    """An edited copy against the script as it is, in pairs of fresh runs; the copy finds the script's own modules."""
    modules = str(Path(program[0]).resolve().parent)

    def timed(name: str, each_s: float, what: str) -> float:
        return run_step_s(program if name == "script" else copy, each_s, tell, what, modules=modules)

    return judged_in_pairs(_pairs("copy", "script", budget_s, timed), min_effect)


def against_revision(program: Sequence[str], revision: str, budget_s: float, min_effect: float, tell: Tell) -> Gate:
    """The program as it is against the same file of an older revision, in pairs of fresh runs."""
    with worktree(revision) as (old_folder, here):

        def timed(name: str, each_s: float, what: str) -> float:
            return run_step_s(program, each_s, tell, what, str(old_folder if name == "old" else here))

        ratios = _pairs("new", "old", budget_s, timed)
    return judged_in_pairs(ratios, min_effect)


def _pairs(new: str, old: str, budget_s: float, timed: Callable[[str, float, str], float]) -> list[float]:
    """log(new / old) of pairs of fresh runs, in random order within each; ``timed(name, seconds, what is told)``."""
    each_s, rng = max(3.0, budget_s / RUNS / 2), random.Random(0)
    ratios = []
    for number in range(RUNS):
        step_s = {name: timed(name, each_s, f"pair {number + 1} of {RUNS}: {name}") for name in rng.sample([old, new], 2)}
        ratios.append(math.log(step_s[new] / step_s[old]))
    return ratios


# --- judging ---
def judged_in_pairs(ratios: Sequence[float], min_effect: float) -> Gate:
    """``ratios``: log(new step time / old step time) of each pair of runs."""
    found = estimate([[r] for r in ratios])
    slower = found.low > 1 and found.speedup > 1 + min_effect
    return Gate(found.speedup, found.low, found.high, max(found.resolution, min_effect), len(ratios), slower)


def judged_apart(new_s: Sequence[float], old_s: Sequence[float], min_effect: float) -> Gate:
    """Seconds of a step in runs of today, and in runs of another day."""
    from scipy import stats

    new, old = [math.log(t) for t in new_s], [math.log(t) for t in old_s]
    center = statistics.fmean(new) - statistics.fmean(old)
    error = math.sqrt(statistics.variance(new) / len(new) + statistics.variance(old) / len(old) + SESSIONS_DIFFER**2)
    degrees = len(new) + len(old) - 2
    t, power = float(stats.t.ppf(0.975, degrees)), float(stats.t.ppf(0.9, degrees))
    low, high = math.exp(center - t * error), math.exp(center + t * error)
    resolution = max(math.expm1((t + power) * error), min_effect)
    return Gate(math.exp(center), low, high, resolution, len(new), low > 1 and center > math.log1p(min_effect))


@contextmanager
def worktree(revision: str) -> Iterator[tuple[Path, Path]]:
    """(folder of ``revision`` that corresponds to the current one, the current folder); the worktree is removed afterwards.

    Raises:
        PerftrainError: no git repository here, or no such revision.
    """
    here = Path.cwd()

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True)
        if done.returncode:
            raise PerftrainError(f"--against needs a git repository and a revision of it; git said: {done.stderr.strip()}")
        return done.stdout.strip()

    inside = git("rev-parse", "--show-prefix")
    with tempfile.TemporaryDirectory(prefix="perftrain-") as folder:
        git("worktree", "add", "--detach", f"{folder}/old", revision)
        try:
            yield Path(folder) / "old" / inside, here
        finally:
            git("worktree", "remove", "--force", f"{folder}/old")
