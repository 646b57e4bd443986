"""How good is the diagnosis? Scripts with known faults are diagnosed, and the answers are compared with the truth.

    python benchmarks/exam/run.py FOLDER                  # every script that FOLDER/truth.yaml names
    python benchmarks/exam/run.py FOLDER --only a.py,b.py --budget 60
    python benchmarks/exam/run.py FOLDER --table          # only the table of what is recorded

Each diagnosis is one line of results/<machine>-<date>.jsonl; the table beside it is made from those lines, the last one of each script.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from perftrain.measure import machine

RESULTS = Path(__file__).parent / "results"


def diagnose(script: Path, budget_s: float) -> dict[str, Any]:
    """One script, as a user would diagnose it."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "diagnosis.json"
        command = [sys.executable, "-m", "perftrain", "diagnose", "--json", str(out), "--budget", str(budget_s), str(script.resolve())]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        seconds = time.perf_counter() - began
        if not out.exists():
            return {"failed": (done.stderr or done.stdout)[-2000:], "seconds": seconds}
        return {**json.loads(out.read_text())["diagnosis"], "seconds": seconds}


def judge(truth: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """The answer beside the truth."""
    if "failed" in answer:
        return {"first": False, "top2": False, "switch": False, "wrong": [], "bound_error": None, "labels": ["FAILED"]}
    causes = truth["cause"] if isinstance(truth["cause"], list) else [truth["cause"]]
    right = {*causes[:1], *(truth.get("also_ok") or [])}
    labels = [c["label"] for c in answer["causes"]]
    offered = [t["switch"] for c in answer["causes"] for t in c["try"] if t.get("switch")]
    wanted = truth.get("switch")
    wanted = [w for w in (wanted if isinstance(wanted, list) else [wanted]) if w]
    wrong = sorted(set(offered) & set(truth.get("wrong_cures") or []))
    first = answer["healthy"] if truth["healthy"] else labels[0] in right
    gain = (truth.get("gain_each") or {}).get("A", truth.get("gain"))
    bound = answer["causes"][0]["upper_bound"]
    return {
        "first": first, "top2": first or bool(set(labels[:2]) & {*causes, *right}), "labels": labels, "healthy": truth["healthy"],
        "switch": all(w in offered for w in wanted) if wanted else None, "wrong": wrong, "bound": bound, "gain": gain,
        "bound_error": None if truth["healthy"] or not gain else abs(bound / gain - 1),
    }  # fmt: skip


def table(rows: list[dict[str, Any]], head: str) -> str:
    sick = [r for r in rows if not r["healthy"]]
    well = [r for r in rows if r["healthy"]]
    errors = [r["bound_error"] for r in sick if r["bound_error"] is not None and r["first"]]
    switches = [r["switch"] for r in rows if r["switch"] is not None]
    lines = [
        f"# Diagnosis: {head}", "",
        f"- first cause right: {sum(r['first'] for r in rows)} of {len(rows)}",
        f"- right cause among the first two: {sum(r['top2'] for r in rows)} of {len(rows)}",
        f"- healthy scripts left alone: {sum(r['first'] for r in well)} of {len(well)}",
        f"- the switch that cures is recommended, where there is one: {sum(switches)} of {len(switches)}",
        f"- scripts for which a cure that does not work is recommended: {sum(bool(r['wrong']) for r in rows)} of {len(rows)}",
        f"- upper bound against the true gain, where the cause is right: median error {statistics.median(errors):.0%}" if errors else "",
        f"- seconds for a diagnosis: median {statistics.median(r['seconds'] for r in rows):.0f}", "",
        "| script | truth | found | upper bound | true gain | switch | wrong cures | seconds |", "|--|--|--|--|--|--|--|--|",
    ]  # fmt: skip
    for r in rows:
        switch = {None: "", True: "right", False: "MISSED"}[r["switch"]]
        mark = "" if r["first"] else " **wrong**"
        cells = [
            r["file"],
            r["truth"],
            ", ".join(r["labels"][:3]) + mark,
            f"{r.get('bound') or 0:.2f}",
            r["gain"],
            switch,
            ", ".join(r["wrong"]),
        ]
        lines.append(f"| {' | '.join(map(str, cells))} | {r['seconds']:.0f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--budget", type=float, default=90)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    truths = {t["file"]: t for t in yaml.safe_load((options.folder / "truth.yaml").read_text())["cases"]}
    described, software = machine.describe(), machine.software()
    stem = f"{options.folder.name}-{machine.machine_id(described)}-{date.today().isoformat()}"
    RESULTS.mkdir(exist_ok=True)
    log = RESULTS / f"{stem}.jsonl"
    only = [n for n in options.only.split(",") if n] or list(truths)
    for name in [] if options.table else only:
        answer = diagnose(options.folder / name, options.budget)
        print(name, [c["label"] for c in answer.get("causes", [])], f"{answer['seconds']:.0f} s", answer.get("failed", ""), flush=True)
        with log.open("a") as f:
            f.write(json.dumps({"file": name, "answer": answer}) + "\n")
    last = {r["file"]: r["answer"] for r in map(json.loads, log.read_text().splitlines())}
    rows = [
        {"file": n, "truth": t["cause"], "gain": t["gain"], "seconds": last[n]["seconds"], "healthy": t["healthy"], **judge(t, last[n])}
        for n, t in truths.items()
        if n in last
    ]
    where = (
        f"{described.get('cpu_model')}, {described.get('cores_usable')} cores, torch {software.get('torch')}, {date.today().isoformat()}"
    )
    head = f"{where}; command: `python benchmarks/exam/run.py {options.folder.name}`"
    text = table(rows, head)
    (RESULTS / f"{stem}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
