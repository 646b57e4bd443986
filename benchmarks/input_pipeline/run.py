"""Images per second and core-seconds per image of every way to make batches from the photos recipe's JPEG files.

    python benchmarks/input_pipeline/run.py [--rounds 3] [--seconds 2] [--only torch,dali] [--cores 1,2]

Every figure is from fresh processes, one of each way a round in random order, bound to one or two cores; the last column is the
rate beside that of the plain DataLoader in the same round. Written to results/<machine>-<date>.md and .json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BATCH_SIZE, SIDE = 16, 96
FFCV = "pip cannot install it without OpenCV's and libjpeg-turbo's headers, and it reads files of its own format only"


def measure(name: str, cores: int, seconds: float) -> dict[str, float]:
    """In this process: images, seconds, and core-seconds of this process and its loader workers."""
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:cores]))
    import psutil
    import torch

    torch.set_num_threads(1)
    from ways import WAYS

    loader = WAYS[name].make(cores)
    batches = endless(loader)
    process = psutil.Process()
    for _ in range(6):
        next(batches)
    begin, used_s, images = time.perf_counter(), core_s(process), 0
    while time.perf_counter() - begin < seconds:
        x, _ = next(batches)
        assert tuple(x.shape[1:]) == (3, SIDE, SIDE), f"{name} gives {tuple(x.shape)}"
        images += len(x)
    took_s = time.perf_counter() - begin
    found = {"images": images, "seconds": took_s, "core_s": core_s(process) - used_s}
    for child in process.children(recursive=True):
        child.kill()
    return found


def endless(loader: Any) -> Any:
    while True:
        yield from loader


def core_s(process: Any) -> float:
    """CPU seconds so far of a process and of those that it has started."""
    every = [process, *process.children(recursive=True)]
    return sum(t.user + t.system for t in (p.cpu_times() for p in every))


def fresh(name: str, cores: int, seconds: float) -> dict[str, float]:
    """The same in a process of its own.

    Raises:
        RuntimeError: it failed; the message is the last line that it said.
    """
    command = [sys.executable, __file__, "--one", name, "--cores", str(cores), "--seconds", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=HERE)
    if done.returncode and not done.stdout.strip().endswith("}"):
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return json.loads(done.stdout.strip().splitlines()[-1])


def ratio(found: dict[str, list[dict[str, float]]], name: str) -> str:
    """Rate beside the plain DataLoader's in the same round, with its 95 % interval."""
    from scipy import stats

    logs = [math.log(a["images"] / a["seconds"] / (b["images"] / b["seconds"])) for a, b in zip(found[name], found["torch"], strict=False)]
    if len(logs) < 2:
        return f"{math.exp(logs[0]):.2f}×" if logs else ""
    half = stats.t.ppf(0.975, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    middle = statistics.mean(logs)
    return f"{math.exp(middle):.2f}× [{math.exp(middle - half):.2f}, {math.exp(middle + half):.2f}]"


def table(results: dict[str, Any]) -> str:
    from ways import WAYS

    lines = [
        f"# Input pipelines on {results['machine']['cpu_model']}, {results['date']}",
        "",
        f"torch {results['software']['torch']}; command: `{results['command']}`; JPEG files of 500 x 375 pixels, "
        f"random crops to {SIDE} x {SIDE}, batches of {BATCH_SIZE}; medians over {results['rounds']} rounds of fresh processes.",
    ]
    for cores, found in results["found"].items():
        lines += ["", f"## {cores} core{'s' if cores != '1' else ''}", ""]
        lines += ["| way | images/s | core-seconds per 1000 images | beside the plain DataLoader |", "|--|--:|--:|--:|"]
        order = sorted(found, key=lambda name: -statistics.median(r["images"] / r["seconds"] for r in found[name]))
        for name in order:
            rate = statistics.median(r["images"] / r["seconds"] for r in found[name])
            cost = statistics.median(1000 * r["core_s"] / r["images"] for r in found[name])
            lines.append(f"| {WAYS[name].title} | {rate:.0f} | {cost:.2f} | {ratio(found, name)} |")
    if results["failed"]:
        lines += ["", "## Not measured", ""] + [f"- {name}: {why}" for name, why in sorted(results["failed"].items())]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--cores", default="1,2")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, int(options.cores), options.seconds)), flush=True)
        os._exit(0)  # loader workers and DALI's threads need no farewell
    from ways import WAYS

    from perftrain.data.photographs import make_photographs
    from perftrain.measure import machine

    make_photographs()
    names = [name for name in WAYS if not options.only or name in options.only.split(",")]
    failed = {name: why for name in names if (why := WAYS[name].missing())}
    results: dict[str, Any] = {
        "machine": machine.describe(), "software": machine.software(), "date": date.today().isoformat(), "rounds": options.rounds,
        "command": " ".join(["python", *sys.argv]), "found": {}, "failed": failed | {"ffcv": FFCV},
    }  # fmt: skip
    rng = random.Random(0)
    for number in range(options.rounds):
        for cores in options.cores.split(","):
            found = results["found"].setdefault(cores, {})
            for name in rng.sample([n for n in names if n not in failed], len(names) - len(failed)):
                try:
                    found.setdefault(name, []).append(fresh(name, int(cores), options.seconds))
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    failed[name] = results["failed"][name] = str(error)
                    found.pop(name, None)
                print(f"round {number + 1}, {cores} cores: {name}", file=sys.stderr, flush=True)
    file = HERE / "results" / f"{machine.machine_id(results['machine'])}-{results['date']}"
    file.parent.mkdir(exist_ok=True)
    file.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    file.with_suffix(".md").write_text(table(results))
    print(table(results))


if __name__ == "__main__":
    main()
