"""Microseconds a step that each training library adds to a hand-written loop. See README.md beside this file.

python benchmarks/overhead/run.py [--processes N] [--steps N] [--only NAME,NAME] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from arms import ARMS
from summary import markdown, process_row, startup_summary, summarize
from workloads import WORKLOADS

HERE = Path(__file__).resolve().parent
STARTUP_ARMS = ("raw", "perftrain")
LIMIT_S = 300
WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # huge pages: less scatter from where the pages happen to lie
}


class WorkerFailed(RuntimeError):
    """The last line of what the process said."""


def run_worker(name: str, steps: int, startup: bool) -> dict[str, Any]:
    """One fresh process, in a folder of its own (some libraries write checkpoints there)."""
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log.txt")
        command = [sys.executable, str(HERE / "worker.py"), "--arm", name, "--steps", str(steps), "--result", str(result)]
        with log.open("w") as said:
            done = subprocess.run(
                command + ["--startup"] * startup,
                cwd=folder,
                env={**os.environ, **WORKER_ENVIRONMENT},
                stdout=said,
                stderr=subprocess.STDOUT,
                timeout=LIMIT_S,
            )
        if done.returncode:
            raise WorkerFailed((log.read_text().strip().splitlines() or [f"exit code {done.returncode}"])[-1])
        return json.loads(result.read_text())


def missing_arms(names: list[str]) -> dict[str, str]:
    return {name: "not installed" for name in names if ARMS[name].package and find_spec(ARMS[name].package) is None}


def run_all(names: list[str], processes: int, steps: int) -> tuple[dict[str, list[Any]], dict[str, list[float]], dict[str, str]]:
    """Rounds of one process for each arm, in random order. Returns overhead, start-up, and why an arm has no figures."""
    missing = missing_arms(names)
    present = [name for name in names if name not in missing]
    jobs = [(name, False) for name in present]
    if set(STARTUP_ARMS) <= set(present):
        jobs += [(name, True) for name in STARTUP_ARMS]
    overhead: dict[str, list[Any]] = defaultdict(list)
    startup: dict[str, list[float]] = defaultdict(list)
    begin, total = time.monotonic(), processes * len(jobs)
    for turn in range(processes):
        for number, (name, is_startup) in enumerate(random.sample(jobs, len(jobs)), turn * len(jobs)):
            left = f"{(time.monotonic() - begin) / number * (total - number):.0f} s left" if number else "starting"
            print(f"\r{number}/{total} processes, {left}: {name:<20}", end="", file=sys.stderr, flush=True)
            if name in missing:
                continue
            try:
                found = run_worker(name, steps, is_startup)
            except (WorkerFailed, subprocess.TimeoutExpired) as error:
                missing[name] = f"failed: {error}"
                continue
            if is_startup:
                startup[name].append(found["startup_s"])
            else:
                overhead[name].append(found)
    print(f"\r{'':<60}\r", end="", file=sys.stderr)
    return overhead, startup, missing


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    wanted = dict.fromkeys(arm.distribution for arm in ARMS.values() if not arm.package or find_spec(arm.package))
    return {"python": platform.python_version(), **{name: version(name) for name in wanted}}


def code_state() -> str:
    """The commit, and whether the tree differs from it."""
    said = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True, check=False)
    return said.stdout.strip() or "not under git"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--processes", type=int, default=5, help="fresh processes of each arm (default 5)")
    parser.add_argument("--steps", type=int, default=500, help="counted steps of one training of the MLP (default 500)")
    parser.add_argument("--only", default=",".join(ARMS), help=f"arms, separated by commas: {', '.join(ARMS)}")
    parser.add_argument("--out", type=Path, help="writes FILE.md and FILE.json (default: results/<machine>-<date>)")
    options = parser.parse_args()
    options.only = options.only.split(",")
    unknown = [name for name in options.only if name not in ARMS]
    if unknown:
        parser.error(f"--only takes names of arms; {', '.join(unknown)} is none. There are: {', '.join(ARMS)}.")
    return options


def main() -> None:
    options = arguments()
    started, begin, load_before = datetime.now(UTC), time.monotonic(), os.getloadavg()[0]
    overhead, startup, missing = run_all(options.only, options.processes, options.steps)
    report = {
        "schema": 1,
        "machine": f"{cpu_model()}, {os.cpu_count()} CPUs, {platform.system()} {platform.release()}",
        "versions": versions(),
        "code": code_state(),
        "command": " ".join(["python benchmarks/overhead/run.py", *sys.argv[1:]]),
        "environment": WORKER_ENVIRONMENT,
        "started": f"{started:%Y-%m-%d %H:%M}",
        "seconds": time.monotonic() - begin,
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
        "missing": missing,
        "overhead": summarize(overhead),
        "startup": startup_summary(startup),
        "processes": {
            "overhead": {n: [{w.name: process_row(found[w.name]) for w in WORKLOADS} for found in o] for n, o in overhead.items()},
            "startup_s": startup,
        },
    }
    machine = re.sub(r"[^a-z0-9]+", "-", cpu_model().lower().replace("(r)", "")).strip("-")
    out: Path = options.out or HERE / "results" / f"{machine}-{os.cpu_count()}cpu-{started:%Y-%m-%d}"
    out.parent.mkdir(parents=True, exist_ok=True)
    text = markdown(report)
    out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    out.with_suffix(".md").write_text(text)
    print(text + f"\nwritten: {out.with_suffix('.md')} and .json")


if __name__ == "__main__":
    main()
