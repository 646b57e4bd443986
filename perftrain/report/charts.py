"""The drawings of a report as plain shapes: positions are computed here, the template draws them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from perftrain.facts import StepRow
from perftrain.report import units
from perftrain.report.bars import Scale

WIDTH = 760
GOOD, QUIET, MARK = "#009E73", "#8a949e", "#F26B1D"
LEFT = 170
"""Room for names."""


def _chart(title: str, height: float, note: str = "") -> dict[str, Any]:
    return {"title": title, "width": WIDTH, "height": height, "lines": [], "dots": [], "boxes": [], "texts": [], "note": note}


def intervals(title: str, rows: Sequence[tuple[str, float | None, tuple[float, float] | None, bool]]) -> dict[str, Any]:
    """Speedups with their intervals on one logarithmic scale, and a line at 1."""
    known = [(n, v, ci or (v, v), kept) for n, v, ci, kept in rows if v]
    scale = Scale.over([ci for _, _, ci, _ in known])
    chart = _chart(title, 26 * len(known) + 34, "95 % intervals; right of the line is faster.")

    def x(value: float) -> float:
        return LEFT + scale.cell(value, WIDTH - LEFT - 90)

    bottom = 26 * len(known) + 8
    chart["lines"].append({"x1": x(1.0), "y1": 0, "x2": x(1.0), "y2": bottom, "color": QUIET, "width": 1, "told": "1.0: no change"})
    ends = [v for v in (scale.low, scale.high) if abs(x(v) - x(1.0)) > 50]  # labels that do not run into each other
    for value in (1.0, *ends):
        chart["texts"].append({"x": x(value), "y": bottom + 16, "anchor": "middle", "told": units.factor(value)})
    for number, (name, value, (low, high), kept) in enumerate(known):
        y, color, told = 26 * number + 16, GOOD if kept else QUIET, units.factor(value, (low, high))
        chart["lines"].append({"x1": x(low), "y1": y, "x2": x(high), "y2": y, "color": color, "width": 3, "told": told})
        chart["dots"].append({"x": x(value), "y": y, "r": 5, "color": color, "told": told})
        chart["texts"].append({"x": 0, "y": y + 4, "anchor": "start", "told": name[:26]})
    return chart


def timeline(rows: Sequence[StepRow]) -> dict[str, Any]:
    """Seconds of each step; those over one and a half times the median are marked."""
    times = [r.step_s for r in rows]
    usual = sorted(times)[len(times) // 2]
    top = min(max(times), 4 * usual) or 1.0
    chart = _chart(
        "Steps, one after the other",
        180,
        f"Median {units.seconds(usual)}; marked: over one and a half times as long. Cut off at {units.seconds(top)}.",
    )
    every = max(1, math.ceil(len(times) / 1500))
    for number in range(0, len(times), every):
        longest = max(range(number, min(number + every, len(times))), key=times.__getitem__)
        spent = times[longest]
        x, y = 40 + (WIDTH - 50) * number / max(1, len(times) - 1), 160 - 145 * min(spent, top) / top
        color = MARK if spent > 1.5 * usual else QUIET
        chart["dots"].append(
            {"x": f"{x:.1f}", "y": f"{y:.1f}", "r": 1.8, "color": color, "told": f"step {rows[longest].step}: {units.seconds(spent)}"}
        )
    for value in (0.0, usual, top):
        chart["texts"].append({"x": 0, "y": 163 - 145 * value / top, "anchor": "start", "told": units.seconds(value)})
    return chart


def histogram(rows: Sequence[StepRow]) -> dict[str, Any]:
    """How many steps took how long, up to the longest one in a hundred."""
    times = sorted(r.step_s for r in rows)
    low, high = times[0], times[min(len(times) - 1, int(0.99 * len(times)))]
    bins = min(40, max(5, int(math.sqrt(len(times)))))
    width = (high - low) / bins or 1e-9
    counts = [0] * bins
    for spent in times:
        if spent <= high:
            counts[min(bins - 1, int((spent - low) / width))] += 1
    chart = _chart("Steps by their length", 150, "The longest one in a hundred is left out.")
    each = (WIDTH - 20) / bins
    for number, count in enumerate(counts):
        tall = 115 * count / max(counts)
        told = f"{count} steps of {units.seconds(low + number * width)} to {units.seconds(low + (number + 1) * width)}"
        chart["boxes"].append(
            {
                "x": f"{10 + number * each:.1f}",
                "y": f"{125 - tall:.1f}",
                "w": f"{each - 1:.1f}",
                "h": f"{tall:.1f}",
                "color": "#0072B2",
                "told": told,
            }
        )
    chart["texts"].append({"x": 10, "y": 142, "anchor": "start", "told": units.seconds(low)})
    chart["texts"].append({"x": WIDTH - 10, "y": 142, "anchor": "end", "told": units.seconds(high)})
    return chart
