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


def empty_chart(title: str, height: float, note: str = "") -> dict[str, Any]:
    """Nothing drawn yet. Shapes are drawn in the order boxes, areas, lines, dots, texts; ``key`` tells the colours apart."""
    shapes: dict[str, Any] = {name: [] for name in ("boxes", "areas", "lines", "dots", "texts", "key")}
    return {"title": title, "width": WIDTH, "height": height, "note": note, **shapes}


def intervals(title: str, rows: Sequence[tuple[str, float | None, tuple[float, float] | None, bool]]) -> dict[str, Any]:
    """Speedups with their intervals on one logarithmic scale, and a line at 1."""
    known = [(n, v, ci or (v, v), kept) for n, v, ci, kept in rows if v]
    scale = Scale.over([ci for _, _, ci, _ in known])
    chart = empty_chart(title, 26 * len(known) + 34, "95 % intervals; right of the line is faster.")

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
    chart = empty_chart(
        "Steps, one after the other",
        180,
        f"Median {units.seconds(usual)}; marked: over one and a half times as long. Cut off at {units.seconds(top)}.",
    )
    every = max(1, math.ceil(len(times) / 1500))
    for number in range(0, len(times), every):
        longest = max(range(number, min(number + every, len(times))), key=times.__getitem__)
        spent = times[longest]
        x, y = 80 + (WIDTH - 90) * number / max(1, len(times) - 1), 160 - 145 * min(spent, top) / top
        color = MARK if spent > 1.5 * usual else QUIET
        chart["dots"].append(
            {"x": f"{x:.1f}", "y": f"{y:.1f}", "r": 1.8, "color": color, "told": f"step {rows[longest].step}: {units.seconds(spent)}"}
        )
    for value in (0.0, *([usual] if 145 * (1 - usual / top) > 14 else []), top):  # labels that do not run into each other
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
    chart = empty_chart("Steps by their length", 150, "The longest one in a hundred is left out.")
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
                "opacity": 1,
                "told": told,
            }
        )
    chart["texts"].append({"x": 10, "y": 142, "anchor": "start", "told": units.seconds(low)})
    chart["texts"].append({"x": WIDTH - 10, "y": 142, "anchor": "end", "told": units.seconds(high)})
    return chart


def waterfall(
    step_s: float, switches: Sequence[tuple[str, float, tuple[float, float]]], bundle: tuple[float, tuple[float, float]] | None
) -> dict[str, Any]:
    """From the step as it was down to the step with everything that was kept, one switch after the other.

    Args:
        switches: name, speedup beside those before it, and its interval.
        bundle: all of them together, measured against the step as it was; None where there is only one.
    """
    rows, lasted, width = [("as it was", step_s, step_s, step_s, step_s)], step_s, 0.0
    for name, speedup, (low, high) in switches:
        before, lasted = lasted, lasted / speedup
        width = math.hypot(width, math.log(high / low) / 2)  # of independent measurements one after the other
        rows.append((f"+ {name}", before, lasted, lasted * math.exp(-width), lasted * math.exp(width)))
    if bundle is not None:
        speedup, (low, high) = bundle
        rows.append(("all together, measured", step_s, step_s / speedup, step_s / high, step_s / low))
    chart = empty_chart(
        "From the step as it was to the step now", 30 * len(rows) + 8, "Pale: what a switch takes away. Lines: 95 % intervals."
    )
    scale = (WIDTH - LEFT - 190) / max(max(row[1], row[4]) for row in rows)
    for number, (name, before, now, low, high) in enumerate(rows):
        _fall(chart, 30 * number + 4, (LEFT + scale * before, LEFT + scale * now), (LEFT + scale * low, LEFT + scale * high), number > 0)
        told = units.seconds(now) + (f", {units.factor(step_s / now, (step_s / high, step_s / low))}" if number else "")
        chart["texts"].append({"x": 0, "y": 30 * number + 20, "anchor": "start", "told": name[:26]})
        chart["texts"].append({"x": f"{LEFT + scale * max(before, high) + 8:.1f}", "y": 30 * number + 20, "anchor": "start", "told": told})
    return chart


def _fall(chart: dict[str, Any], top: float, bar: tuple[float, float], whisker: tuple[float, float], changed: bool) -> None:
    """One row: the bar as it is now, what fell away, and the interval of its end."""
    before, now = bar
    color = GOOD if changed else QUIET
    box = {"y": top, "h": 22, "color": color}
    chart["boxes"].append({**box, "x": LEFT, "w": f"{now - LEFT:.1f}", "opacity": 1, "told": ""})
    if changed:
        chart["boxes"].append({**box, "x": f"{now:.1f}", "w": f"{max(0.0, before - now):.1f}", "opacity": 0.25, "told": ""})
        left, right = whisker
        middle = {"y1": top + 11, "y2": top + 11, "x1": f"{left:.1f}", "x2": f"{right:.1f}"}
        chart["lines"].append({**middle, "color": MARK, "width": 2, "told": ""})
        for at in whisker:
            tick = {"y1": top + 6, "y2": top + 16, "x1": f"{at:.1f}", "x2": f"{at:.1f}"}
            chart["lines"].append({**tick, "color": MARK, "width": 2, "told": ""})
