"""Every switch on every recipe: one verdict each, in one table.

    python benchmarks/switches/run.py                          # everything that runs here (over an hour on 2 cores)
    python benchmarks/switches/run.py --recipes digits --only amp,fused
    python benchmarks/switches/run.py --table                  # only the table of what is recorded

Each verdict is one line of results/<machine>-<date>.jsonl, so a run can be stopped and continued. Nothing else heavy may
run meanwhile. What cannot run on this machine is not tried; the table gives the reason.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from perftrain.facts import ranked
from perftrain.measure import machine
from perftrain.report.jsonfile import verdict_from_json
from perftrain.report.markdown import escape, ranking_markdown

RESULTS = Path(__file__).parent / "results"
RECIPES = ("digits", "photos", "text")
CONTROLS = ("nothing", "delay")
COMPANIONS = {"persistent_workers": "workers", "prefetch": "workers", "in_order": "workers"}
"""What a switch needs beside it to have anything to act on: measured as a bundle."""
BUNDLES = {
    "digits": ["fused,workers"],
    "photos": ["amp,channels_last", "amp,channels_last,fast_decode", "amp,channels_last,fast_decode,workers", "amp,channels_last,compile"],
    "text": ["amp,length_buckets", "amp,length_buckets,fused"],
}
LIMIT_S = 900


def perftrain(*arguments: str) -> dict[str, Any]:
    """What one command wrote with ``--json``.

    Raises:
        RuntimeError: it failed; the message is the last line that it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "facts.json")
        done = subprocess.run(
            [sys.executable, "-m", "perftrain", *arguments, "--json", str(file)], capture_output=True, text=True, timeout=LIMIT_S
        )
        if done.returncode or not file.exists():
            raise RuntimeError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
        return json.loads(file.read_text())


def wanted(opts: list[dict[str, Any]], recipe: str, only: set[str]) -> list[str]:
    """What to type after ``try``, in the order of the alphabet, controls first."""
    names = [o["name"] for o in opts if o["runs_here"]]
    names.sort(key=lambda name: (name not in CONTROLS, name))
    lines = [",".join(filter(None, [COMPANIONS.get(name), name])) for name in names] + BUNDLES[recipe]
    return [line for line in lines if not only or only & set(line.split(","))]


def measure(recipe: str, switches: str, budget_s: float, runs: str) -> dict[str, Any]:
    row: dict[str, Any] = {"recipe": recipe, "switches": switches, "budget_s": budget_s}
    try:
        return {**row, "verdict": perftrain("try", switches, f"recipe={recipe}", "--budget", str(budget_s), "--runs", runs)["verdict"]}
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return {**row, "failed": str(error)}


def table(rows: list[dict[str, Any]], opts: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    parts = [
        f"# Every switch on {facts['cpu_model']}, {facts['cores_usable']} cores, {facts['date']}",
        f"torch {facts['torch']}; command: `python benchmarks/switches/run.py`; {len(rows)} verdicts, each with its own interval: "
        "one in twenty intervals misses the truth, so read a small gain in a long table with care.",
    ]
    for recipe in RECIPES:
        own = [r for r in rows if r["recipe"] == recipe]
        if not own:
            continue
        parts.append(f"## {recipe}")
        parts.append(ranking_markdown(ranked([verdict_from_json(r["verdict"]) for r in own if "verdict" in r])).rstrip())
        parts += [f"- {escape(r['switches'])} could not be measured: {escape(r['failed'])}" for r in own if "failed" in r]
    parts.append("## What does not run on this machine")
    parts.append("\n".join(f"- {escape(o['name'])}: {escape(o['reason'])}" for o in opts if not o["runs_here"]))
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--only", default="", help="names of switches, comma between them")
    parser.add_argument("--budget", type=float, default=15, help="seconds of timing for each verdict (default 15)")
    parser.add_argument("--next", type=int, default=None, help="measure at most so many, then stop")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    options = parser.parse_args()
    described, opts = machine.describe(), perftrain("opts")["opts"]
    facts = {**described, "date": date.today().isoformat(), "torch": machine.software().get("torch")}
    file = RESULTS / f"{machine.machine_id(described)}-{facts['date']}.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(r["recipe"], r["switches"]) for r in rows}
    only = {name for name in options.only.split(",") if name}
    todo = [(r, s) for r in options.recipes.split(",") for s in wanted(opts, r, only) if (r, s) not in done]
    with tempfile.TemporaryDirectory() as runs:  # baselines are recorded anew: the code may have changed
        for recipe, switches in [] if options.table else todo[: options.next]:
            rows.append(measure(recipe, switches, options.budget, runs))
            with file.open("a") as out:
                out.write(json.dumps(rows[-1]) + "\n")
            verdict = rows[-1].get("verdict", {})
            print(
                recipe, switches, verdict.get("decision", rows[-1].get("failed")), verdict.get("speedup"), verdict.get("ci95"), flush=True
            )
    file.with_suffix(".md").write_text(table(rows, opts, facts))


if __name__ == "__main__":
    main()
