"""Is the instrument right? Comparisons whose answer is known, many times over.

    python benchmarks/measuring/run.py                       # everything (about three hours on 2 cores)
    python benchmarks/measuring/run.py --only aa-digits --count 10
    python benchmarks/measuring/run.py --table               # only the table of what is recorded

Each comparison is one line of results/<machine>-<date>.jsonl, so a run can be stopped and continued; the table is made
from all lines of the file. Nothing else heavy may run meanwhile, except the hog that some cases start themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from perftrain.compare.duet import ASIDE_SHARE, BASELINE, VARIANT, Protocol, Timing, time_arms
from perftrain.compare.job import Job
from perftrain.compare.verdict import decide
from perftrain.facts import ArmSummary, Numerics, Parity, StepBreakdown
from perftrain.measure import machine
from perftrain.measure.statistics import estimate
from perftrain.opt import Delay, Nothing
from perftrain.store import Store
from perftrain_recipes.digits import Digits
from perftrain_recipes.photos import Photos

RESULTS = Path(__file__).parent / "results"
RECIPES = {"digits": Digits, "photos": Photos}
NO_PARITY = Parity(Numerics.EXACT, True, 0, 0.0, 0.0, "not looked at here")


@dataclass(frozen=True)
class Case:
    """A comparison with a known answer: the variant takes ``1 + fraction`` times as long."""

    name: str
    recipe: str
    fraction: float
    hog: bool
    count: int
    resolution: float | None = None
    """None: the default; 0 measures until the budget ends."""
    budget_s: float | None = None


CASES = [
    *(
        Case(f"{kind}-{recipe}{'-hog' if hog else ''}", recipe, fraction, hog, count)
        for hog in (False, True)
        for kind, recipe, fraction, count in (
            ("aa", "digits", 0.0, 40),
            ("delay", "digits", 0.03, 20),
            ("aa", "photos", 0.0, 20),
            ("delay", "photos", 0.10, 20),
        )
    ),
    Case("budget-digits", "digits", 0.0, False, 1, 0.0, 120),
    Case("budget-photos", "photos", 0.0, False, 1, 0.0, 120),
]


def compare(case: Case, number: int) -> dict[str, Any]:
    protocol = Protocol(seed=1000 * number + 7)
    if case.resolution is not None:
        protocol = replace(protocol, resolution=case.resolution)
    if case.budget_s is not None:
        protocol = replace(protocol, budget_s=case.budget_s)
    switch = Delay(fraction=case.fraction) if case.fraction else Nothing()
    RECIPES[case.recipe]().prepare()
    opts = ({"_target_": _path(type(switch)), **vars(switch)},)
    job = Job(case.recipe, {"_target_": _path(RECIPES[case.recipe])}, Store("runs"), opts, "cpu", protocol)
    environments, _ = job.environments(job.switches())
    timing = time_arms(job.spec(), environments, protocol)
    arms = [timing.summary(arm, None, 0.0) for arm in (BASELINE, VARIANT)]
    verdict = decide([switch.card.name], timing.estimate(), NO_PARITY, arms[0], arms[1], protocol, timing.disturbed())
    assert verdict.ci95 is not None
    truth = 1 / (1 + case.fraction)
    row: dict[str, Any] = {
        "case": case.name, "number": number, "decision": str(verdict.decision), "speedup": verdict.speedup, "ci95": verdict.ci95,
        "resolution": verdict.resolution, "covers": verdict.ci95[0] <= truth <= verdict.ci95[1], "rounds": timing.rounds(),
        "disturbed_share": timing.disturbed_share(), "only_quiet_turns": timing.chooses(), "quiet": timing.quiet,
        "processes": len(timing.groups), "seconds": timing.seconds, "step_s": arms[0].breakdown.step_s,
        "groups": timing.groups, "protocol": asdict(protocol),
    }  # fmt: skip
    if case.name.startswith("budget"):
        row["by_budget"] = by_budget(timing)
    return row


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"


def by_budget(timing: Timing) -> list[dict[str, Any]]:
    """What the same measurement would have resolved after less time."""
    found = []
    for budget_s in (15, 30, 60, 120):
        left, groups = sum(end <= budget_s for end in timing.round_ends_s), []
        for group in timing.groups:
            groups.append(group[: max(0, left)])
            left -= len(group)
        if sum(map(len, groups)) >= 4:
            e = estimate(groups)
            found.append(
                {
                    "budget_s": budget_s,
                    "rounds": e.rounds,
                    "speedup": e.speedup,
                    "ci95": [e.low, e.high],
                    "resolution": e.resolution,
                }
            )
    return found


# --- the other program ---
@contextmanager
def hog(on: bool) -> Iterator[None]:
    """Another process that keeps one core busy in random bursts of 0.1 to 2 s. Nobody's child: whoever measures must not know it."""
    if not on:
        yield
        return
    words = [sys.executable, str(Path(__file__).with_name("hog.py")), str(os.getpid())]
    start = f"import subprocess; print(subprocess.Popen({words!r}, start_new_session=True, stdout=subprocess.DEVNULL).pid)"
    pid = int(subprocess.run([sys.executable, "-c", start], stdout=subprocess.PIPE, text=True, check=True).stdout)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)


# --- the table ---
def table(rows: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    lines = [
        f"# Measuring on {facts['cpu_model']}, {facts['cores_usable']} cores, {facts['date']}",
        "",
        f"torch {facts['torch']}; command: `python benchmarks/measuring/run.py`; "
        f"made from the {len(rows)} comparisons in the .jsonl beside it.",
        "",
        "| case | truth | comparisons | decisions | wrong | by the rules of this version | interval covers the truth "
        "| median half width | median resolution | seconds each |",
        "|--|--|--|--|--|--|--|--|--|--|",
    ]
    for case in CASES:
        own = [r for r in rows if r["case"] == case.name]
        if own and not case.name.startswith("budget"):
            lines.append(_line(case, own))
    for case in CASES:
        for row in (r for r in rows if r["case"] == case.name and "by_budget" in r):
            lines += [
                "",
                f"Resolution against budget, A/A on {case.recipe}:",
                "",
                "| budget s | rounds | speedup | interval | resolution |",
                "|--|--|--|--|--|",
            ]
            lines += [
                f"| {b['budget_s']} | {b['rounds']} | {b['speedup']:.4f} "
                f"| [{b['ci95'][0]:.4f}, {b['ci95'][1]:.4f}] | {b['resolution']:.2%} |"
                for b in row["by_budget"]
            ]
    return "\n".join(lines) + "\n"


def _line(case: Case, own: list[dict[str, Any]]) -> str:
    covers = sum(r["covers"] for r in own)
    low, high = stats.binomtest(covers, len(own)).proportion_ci(method="wilson")
    half = np.median([np.log(r["ci95"][1] / r["ci95"][0]) / 2 for r in own])
    return (
        f"| {case.name} | {1 / (1 + case.fraction):.3f} | {len(own)} of {case.count} | {counted([r['decision'] for r in own])} "
        f"| {sum(wrong(case, r) for r in own)} | {counted([judged_again(r) for r in own])} "
        f"| {covers} of {len(own)} ({low:.0%}–{high:.0%}) | ±{half:.2%} "
        f"| {np.median([r['resolution'] for r in own]):.2%} | {np.median([r['seconds'] for r in own]):.0f} |"
    )


def counted(decisions: list[str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(Counter(decisions).items()))


def judged_again(row: dict[str, Any]) -> str:
    """What this version decides from the recorded rounds."""
    quiet = row.get("only_quiet_turns", False)
    disturbed = not quiet and row.get("disturbed_share", 0.0) > ASIDE_SHARE
    arm = ArmSummary(StepBreakdown({}, 1, 1), None, 0.0)
    found = estimate(row["quiet"] if quiet else row["groups"])
    return str(decide([], found, NO_PARITY, arm, arm, Protocol(**row["protocol"]), disturbed).decision)


def wrong(case: Case, row: dict[str, Any]) -> bool:
    """A direction that is not there, or "no difference" though there is one of a size that it says it would have seen."""
    right = "slower" if case.fraction else None
    blind = row["decision"] == "no_difference" and case.fraction > row["resolution"]
    return blind or (row["decision"] in ("faster", "slower") and row["decision"] != right)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of cases, comma between them")
    parser.add_argument("--count", type=int, default=None, help="comparisons of each case, at most its own count")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    options = parser.parse_args()
    described, software = machine.describe(), machine.software()
    facts = {
        "cpu_model": described.get("cpu_model"),
        "cores_usable": described.get("cores_usable"),
        "date": date.today().isoformat(),
        "torch": software.get("torch"),
    }
    file = RESULTS / f"{machine.machine_id(described)}-{facts['date']}.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    wanted = [c for c in CASES if not options.only or c.name in options.only.split(",")]
    for case in [] if options.table else wanted:
        done = {r["number"] for r in rows if r["case"] == case.name}
        with hog(case.hog):
            for number in range(min(case.count, options.count or case.count)):
                if number in done:
                    continue
                rows.append(compare(case, number))
                with file.open("a") as out:
                    out.write(json.dumps(rows[-1]) + "\n")
                shown = {k: rows[-1][k] for k in ("case", "number", "decision", "speedup", "ci95", "covers", "seconds")}
                print(shown, file=sys.stderr, flush=True)
    text = table(rows, facts)
    file.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
