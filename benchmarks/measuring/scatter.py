"""What makes two identical programs differ? The scatter of step times between steps, builds and processes, by settings.

    python benchmarks/measuring/scatter.py          # about a quarter of an hour on 2 cores

Every setting gets fresh processes in turn; in each the recipe is built several times and trained for a stretch. Figures are
standard deviations of the log of the step time: between steps of a build, between the means of builds of a process, and
between the means of processes. ``settle`` is how much slower the first ten steps of a process are than its last.
"""

from __future__ import annotations

import argparse
from datetime import date
from pathlib import Path

import numpy as np

from perftrain.compare.channel import Worker
from perftrain.compare.job import steady_malloc
from perftrain.measure import machine
from perftrain.opt.huge_pages import with_tunable

RESULTS = Path(__file__).parent / "results"
SETTINGS = {
    "as it comes": {},
    "huge pages": {"GLIBC_TUNABLES": with_tunable("")},
    "malloc keeps its memory": {"GLIBC_TUNABLES": steady_malloc("").replace(":glibc.malloc.hugetlb=1", "")},
    "both (measure.stabilize)": {"GLIBC_TUNABLES": steady_malloc("")},
    "both, threads bound": {"GLIBC_TUNABLES": steady_malloc(""), "OMP_PROC_BIND": "true"},
    "both, one thread": {"GLIBC_TUNABLES": steady_malloc(""), "OMP_NUM_THREADS": "1"},
    "both, idle threads sleep": {"GLIBC_TUNABLES": steady_malloc(""), "OMP_WAIT_POLICY": "passive"},
}
WORKERS = {"_target_": "perftrain.opt.workers.Workers"}
STEPS = {"digits": 400, "photos": 16}
TARGETS = {"digits": "perftrain_recipes.digits.Digits", "photos": "perftrain_recipes.photos.Photos"}


def measure(recipe: str, environment: dict[str, str], processes: int, builds: int, workers: bool = False) -> str:
    spec = {"recipe": {"_target_": TARGETS[recipe]}, "arms": {"it": [WORKERS] if workers else []}, "device": "cpu"}
    means, within, settle = [], [], []
    for number in range(processes):
        with Worker(spec, environment) as worker:
            own = []
            for build in range(builds):
                worker.call("scatter", seed=100 * number + build)
                worker.call("build", arm="it", seed=build)
                step_s = np.log(worker.call("block", arm="it", steps=STEPS[recipe], each=True)["step_s"])
                worker.call("drop")
                own.append(step_s.mean())
                within.append(step_s.std(ddof=1))
                if build == 0:
                    settle.append(step_s[:10].mean() - step_s[-10:].mean())
            means.append(own)
    table = np.array(means)
    between_builds = np.sqrt(table.var(axis=1, ddof=1).mean())
    return (
        f"{1e3 * np.exp(table.mean()):.3g} | {np.median(within):.1%} | {between_builds:.1%} | "
        f"{table.mean(axis=1).std(ddof=1):.1%} | {np.mean(settle):+.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--builds", type=int, default=4)
    options = parser.parse_args()
    described = machine.describe()
    file = RESULTS / f"scatter-{machine.machine_id(described)}-{date.today()}.md"
    lines = [
        f"# Scatter of step times on {described['cpu_model']}, {described['cores_usable']} cores, {date.today()}",
        "",
        f"Command: `python benchmarks/measuring/scatter.py --processes {options.processes} --builds {options.builds}`, "
        "nothing else running.",
    ]
    for recipe in TARGETS:
        lines += [
            "",
            f"## {recipe}",
            "",
            "| settings | step ms | between steps | between builds | between processes | settle |",
            "|--|--|--|--|--|--|",
        ]
        for name, environment in SETTINGS.items():
            lines.append(f"| {name} | {measure(recipe, environment, options.processes, options.builds)} |")
            print(lines[-1], flush=True)
            file.write_text("\n".join(lines) + "\n")  # row by row: a run that is stopped keeps what it measured
        steady = SETTINGS["both (measure.stabilize)"]
        lines.append(f"| both, loader workers | {measure(recipe, steady, options.processes, options.builds, workers=True)} |")
        print(lines[-1], flush=True)
        file.write_text("\n".join(lines) + "\n")
    print(f"written: {file}")


if __name__ == "__main__":
    main()
