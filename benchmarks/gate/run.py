"""How often does the gate cry wolf? Many fresh runs of one script, cut at random into "before" and "now", and judged.

    python benchmarks/gate/run.py [--runs 24] [--seconds 5] [script.py]

False alarms: both sides are the same program. Seen: every run of one side is made longer on paper by a known part. Runs of one
sitting; that a machine differs from day to day is what ``gate`` adds by itself (``SESSIONS_DIFFER``) and what this does not show.
Written to results/<machine>-<date>.json.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Callable
from datetime import date
from pathlib import Path

from perftrain.compare.gate import RUNS, Gate, judged_apart, judged_in_pairs, run_step_s
from perftrain.gated import MIN_EFFECT
from perftrain.measure import machine

HERE = Path(__file__).parent
SCRIPT = HERE.parents[1] / "tests" / "diagnose" / "cases" / "healthy_gan.py"
SPLITS = 4000
SLOWDOWNS = (1.0, 1.03, 1.05, 1.1, 1.2)


def apart(times: list[float], slowdown: float) -> Gate:
    return judged_apart([t * slowdown for t in times[:RUNS]], times[RUNS : 2 * RUNS], MIN_EFFECT)


def in_pairs(times: list[float], slowdown: float) -> Gate:
    return judged_in_pairs([math.log(times[2 * i] * slowdown / times[2 * i + 1]) for i in range(RUNS)], MIN_EFFECT)


def alarms(times: list[float], judge: Callable[[list[float], float], Gate], slowdown: float) -> float:
    """Part of random splits in which the gate says "slower"."""
    rng = random.Random(0)
    return sum(judge(rng.sample(times, 2 * RUNS), slowdown).slower for _ in range(SPLITS)) / SPLITS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", nargs="?", default=str(SCRIPT))
    parser.add_argument("--runs", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    times = []
    for number in range(options.runs):
        times.append(run_step_s([options.script], options.seconds, lambda *_: None, ""))
        print(f"run {number + 1}: {1e3 * times[-1]:.3f} ms a step", flush=True)
    described = machine.describe()
    found = {
        "machine": described.get("cpu_model"), "torch": machine.software().get("torch"), "date": date.today().isoformat(),
        "command": f"python benchmarks/gate/run.py --runs {options.runs} --seconds {options.seconds:g}",
        "script": Path(options.script).name, "step_s": times, "scatter": statistics.stdev(map(math.log, times)),
        "called_slower": {
            name: {f"{slowdown:g}": alarms(times, judge, slowdown) for slowdown in SLOWDOWNS}
            for name, judge in (("--baseline", apart), ("--against", in_pairs))
        },
    }  # fmt: skip
    file = HERE / "results" / f"{machine.machine_id(described)}-{date.today()}.json"
    file.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({k: v for k, v in found.items() if k != "step_s"}, indent=1))


if __name__ == "__main__":
    main()
