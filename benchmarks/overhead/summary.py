"""From what the processes saw to figures: a median over processes with its interval, and the table that shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from arms import ARMS
from workloads import WORKLOADS

RESAMPLES = 10_000


@dataclass(frozen=True)
class Figure:
    """A median over fresh processes and its 95 % interval."""

    median: float
    low: float
    high: float
    processes: int

    def text(self, number: str) -> str:
        """``number`` is a format such as ``+.1f``. Fewer than three processes give no interval."""
        if self.processes < 3:
            return f"{self.median:{number}}"
        return f"{self.median:{number}} [{self.low:{number}}, {self.high:{number}}]"


def figure(values: Sequence[float]) -> Figure:
    """Bootstrap over processes, the level at which the figures scatter."""
    seen = np.asarray(values)
    drawn = np.random.default_rng(0).choice(seen, size=(RESAMPLES, len(seen)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return Figure(float(np.median(seen)), float(low), float(high), len(seen))


def process_row(fits: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One process on one workload: microseconds a step of the arm and of the raw loop that took turns with it."""
    steps = sum(fit["slice_steps"] * len(fit["arm_slice_s"]) for fit in fits)
    arm_us = 1e6 * sum(sum(fit["arm_slice_s"]) for fit in fits) / steps
    raw_us = 1e6 * sum(sum(fit["raw_slice_s"]) for fit in fits) / steps
    return {
        "arm_us": arm_us,
        "raw_us": raw_us,
        "overhead_us": arm_us - raw_us,
        "counted_steps": steps,
        "trained_steps": [fit["steps"] for fit in fits],
        "final_loss": [fit["final_loss"] for fit in fits],
        "same_parameters": all(fit["same_parameters"] for fit in fits),
    }


def check(rows: Sequence[dict[str, Any]]) -> str:
    """Did the arm train what the raw loop trained?"""
    steps = {count for row in rows for pair in row["trained_steps"] for count in pair.values()}
    losses = {loss for row in rows for pair in row["final_loss"] for loss in pair.values()}
    if all(row["same_parameters"] for row in rows) and len(steps) == len(losses) == 1:
        return f"same bits: {steps.pop()} steps, loss {losses.pop():.6f}"
    return f"DIFFERS: steps {sorted(steps)}, losses {sorted(losses)}"


def arm_summary(name: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    overhead = figure([row["overhead_us"] for row in rows])
    raw_us = float(np.median([row["raw_us"] for row in rows]))
    return {
        "arm": name,
        "overhead_us": asdict(overhead),
        "raw_us": raw_us,
        "overhead_share": overhead.median / raw_us,
        "check": check(rows),
        "text": overhead.text("+.1f"),
    }


def summarize(seen: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """``seen``: arm -> what each of its processes found. Returns workload -> a summary of each arm, in the arms' order."""
    measured = [name for name in ARMS if seen.get(name)]
    return {w.name: [arm_summary(name, [process_row(found[w.name]) for found in seen[name]]) for name in measured] for w in WORKLOADS}


def startup_summary(seen: dict[str, list[float]]) -> dict[str, Any]:
    """Seconds of each arm, and perftrain's over the raw loop's of the same round."""
    if not seen.get("raw") or not seen.get("perftrain"):
        return {}
    over = figure([p - r for p, r in zip(seen["perftrain"], seen["raw"], strict=False)])
    return {
        "raw_s": asdict(figure(seen["raw"])),
        "perftrain_s": asdict(figure(seen["perftrain"])),
        "over_raw_s": asdict(over),
    }


# --- Markdown ---
def markdown(report: dict[str, Any]) -> str:
    lines = [
        "# Overhead of a training loop",
        "",
        f"- machine: {report['machine']}",
        f"- versions: {', '.join(f'{name} {version}' for name, version in report['versions'].items())}",
        f"- code: {report['code']}",
        f"- command: `{report['command']}`",
        f"- started {report['started']} UTC, took {report['seconds']:.0f} s; load average {report['load_before']:.2f} before, "
        f"{report['load_after']:.2f} after (this benchmark keeps one CPU busy)",
        *(f"- {name}: {reason}" for name, reason in report["missing"].items()),
    ]
    for name, arms in report["overhead"].items():
        lines += ["", f"## {name}: microseconds a step over the raw loop", "", *workload_table(arms)]
    if report["startup"]:
        lines += [
            "",
            "## Start-up: seconds from before the imports until one step is trained",
            "",
            *startup_table(report["startup"]),
        ]
    return "\n".join(lines) + "\n"


def workload_table(arms: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "| library | variant | overhead µs [95 %] | raw step µs | overhead | processes | check |",
        "|--|--|--:|--:|--:|--:|--|",
    ]
    for row in arms:
        arm = ARMS[row["arm"]]
        lines.append(
            f"| {arm.library} | {arm.variant} | {row['text']} | {row['raw_us']:.0f} | {row['overhead_share']:+.1%} "
            f"| {row['overhead_us']['processes']} | {row['check']} |"
        )
    return lines


def startup_table(startup: dict[str, Any]) -> list[str]:
    labels = {"raw_s": "raw loop", "perftrain_s": "perftrain Trainer", "over_raw_s": "perftrain over raw, same round"}
    lines = ["| | s [95 %] | processes |", "|--|--:|--:|"]
    for key, label in labels.items():
        seen = Figure(**startup[key])
        lines.append(f"| {label} | {seen.text('.2f')} | {seen.processes} |")
    return lines
