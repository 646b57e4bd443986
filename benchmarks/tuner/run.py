"""How good is the closed loop? What it finds against the best of every switch tried, and the time that both take.

    python benchmarks/tuner/run.py FOLDER                        # scripts of FOLDER/truth.yaml whose cure is a switch, and healthy ones
    python benchmarks/tuner/run.py --recipes digits,text         # recipes, against every switch of benchmarks/switches/results
    python benchmarks/tuner/run.py FOLDER --only a.py --budget 240
    python benchmarks/tuner/run.py --table                       # only the table of what is recorded

Each tuning is one line of results/<machine>-<date>.jsonl, so a run can be stopped and continued; the table beside it is made
from those lines. Nothing else heavy may run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from perftrain.measure import machine

HERE = Path(__file__).parent
RESULTS, GRID = HERE / "results", HERE.parent / "switches" / "results"
Row = dict[str, Any]


def tuned(words: list[str], budget_s: float) -> Row:
    """What ``perftrain tune`` wrote with ``--json``, and how long it took."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "tune.json")
        command = [sys.executable, "-m", "perftrain", "tune", "--budget", str(budget_s), "--runs", folder, "--json", str(out), *words]
        done = subprocess.run(command, capture_output=True, text=True)
        if not out.exists():
            return {"failed": (done.stderr or done.stdout)[-1000:]}
        found = json.loads(out.read_text())["tune"]
    keys = ("speedup", "ci95", "kept", "ledger", "next_bottleneck")
    return {**{k: found[k] for k in keys}, "total_s": time.perf_counter() - began}


def scripts(folder: Path, only: set[str]) -> Iterable[tuple[str, list[str], Row]]:
    """Name, what to type, and the known best: the gain of the cure where that is a switch; 1 for healthy scripts."""
    for case in yaml.safe_load((folder / "truth.yaml").read_text())["cases"]:
        if (case.get("switch") or case["healthy"]) and (not only or case["file"] in only):
            cure = case.get("switch") or []
            best = 1.0 if case["healthy"] else (case.get("gain_each") or {}).get("A", case["gain"])
            yield case["file"], [str(folder / case["file"])], {"best": best, "best_is": cure, "grid_s": None}


def recipes(names: Iterable[str]) -> Iterable[tuple[str, list[str], Row]]:
    """Name, what to type, and the best single switch of the newest grid of all switches on this machine."""
    files = sorted(GRID.glob(f"{machine.machine_id(machine.describe())}-*.jsonl"))
    rows = [json.loads(line) for line in files[-1].read_text().splitlines()] if files else []
    for name in names:
        own = [r["verdict"] for r in rows if r["recipe"] == name and "verdict" in r]
        faster = [v for v in own if v["decision"] == "faster" and (v.get("parity") or {}).get("class") != "CHANGED"]
        best = max(faster, key=lambda v: v["speedup"], default=None)
        yield name, [f"recipe={name}"], {
            "best": best["speedup"] if best else 1.0 if own else None,
            "best_is": best["switches"] if best else [],
            "grid_s": sum(v.get("seconds") or 0.0 for v in own) if own else None,
        }  # fmt: skip


def table(rows: list[Row], place: str) -> str:
    """Every tuning beside the best that is known, and the figures over all of them."""
    parts = [
        f"# The closed loop on {place}",
        "`best` is the gain of the known cure (scripts, measured apart) or the best single switch of the grid (recipes). `reached` is the "
        "tuned gain / best. `of the grid` is the tuning's time / the time of trying every switch once.",
        "| program | kept | tuned | best | reached | s | of the grid |\n|--|--|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        if "failed" in row:
            parts[-1] += f"\n| {row['name']} | failed: {row['failed'].splitlines()[-1][:80]} | | | | | |"
            continue
        gain, best = row["speedup"] or 1.0, row["best"]
        ci = f" [{row['ci95'][0]:.2f}, {row['ci95'][1]:.2f}]" if row.get("ci95") and None not in row["ci95"] else ""
        told_best = f"{best:.2f} ({', '.join(row['best_is']) if isinstance(row['best_is'], list) else row['best_is']})" if best else ""
        grid = f"{row['total_s'] / row['grid_s']:.0%}" if row.get("grid_s") else ""
        parts[-1] += (
            f"\n| {row['name']} | {', '.join(row['kept']) or 'nothing'} | {gain:.2f}{ci} | {told_best} | "
            f"{f'{gain / best:.0%}' if best else ''} | {row['total_s']:.0f} | {grid} |"
        )
    parts.append("\n".join(_figures([r for r in rows if "failed" not in r])))
    return "\n\n".join(parts) + "\n"


def _figures(rows: list[Row]) -> Iterable[str]:
    reached = [(r["speedup"] or 1.0) / r["best"] for r in rows if r["best"]]
    entries = [e for r in rows for e in r["ledger"] if e.get("measured")]
    errors = [max(e["predicted"][0] - e["measured"], e["measured"] - e["predicted"][1], 0.0) for e in entries]
    if reached:
        yield f"- reached: median {statistics.median(reached):.0%}, at least 98 % in {sum(r >= 0.98 for r in reached)} of {len(reached)}"
        yield f"- slower than the program as it was: {sum((r['speedup'] or 1.0) < 0.99 for r in rows)} of {len(rows)}"
    if errors:
        yield f"- measured gain outside the predicted range: by {100 * statistics.median(errors):.0f} points at the median of {len(errors)}"
    spent = [r["total_s"] / r["grid_s"] for r in rows if r.get("grid_s")]
    if spent:
        yield f"- time against the grid: median {statistics.median(spent):.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--recipes", default="")
    parser.add_argument("--only", default="", help="names of scripts, comma between them")
    parser.add_argument("--budget", type=float, default=240, help="seconds for each tuning (default 240)")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    options = parser.parse_args()
    described = machine.describe()
    file = RESULTS / f"{machine.machine_id(described)}-{date.today()}.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {row["name"] for row in rows}
    todo = [*(scripts(options.folder, {n for n in options.only.split(",") if n}) if options.folder else ()),
            *recipes(n for n in options.recipes.split(",") if n)]  # fmt: skip
    for name, words, known in [] if options.table else todo:
        if name in done:
            continue
        rows.append({"name": name, "budget_s": options.budget, **known, **tuned(words, options.budget)})
        with file.open("a") as out:
            out.write(json.dumps(rows[-1]) + "\n")
        print(name, rows[-1].get("kept", rows[-1].get("failed")), rows[-1].get("speedup"), flush=True)
    place = f"{described['cpu_model']}, {described['cores_usable']} cores, torch {machine.software().get('torch')}, {date.today()}"
    file.with_suffix(".md").write_text(table(rows, place))


if __name__ == "__main__":
    main()
