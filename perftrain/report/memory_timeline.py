"""Memory over one step: what lives from step to step as bands, what the step allocates on top of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from perftrain.report import units
from perftrain.report.bars import looks
from perftrain.report.charts import MARK, QUIET, WIDTH, empty_chart

LEFT, TOP, RIGHT, BOTTOM = 78.0, 30.0, WIDTH - 12.0, 232.0
BANDS = {"weights_bytes": "#0072B2", "gradients_bytes": "#56B4E9", "optimizer_bytes": "#009E73"}
TRANSIENT = "#E69F00"
MOST_POINTS = 1200
ROOM_FOR_A_LETTER = 7.0


def memory_timeline(memory: Mapping[str, Any], title: str = "Memory in one step") -> dict[str, Any] | None:
    """The drawing; None where no timeline was recorded.

    Args:
        memory: the diagnosis' ``memory``: bytes of the bands, ``timeline`` and ``phases``, all of them optional.
    """
    points = _thinned([(float(t), float(b)) for t, b in memory.get("timeline") or () if units.known(t) and units.known(b)])
    spans = [(str(n), float(a), float(b)) for n, a, b in memory.get("phases") or () if units.known(a) and units.known(b)]
    if len(points) < 2:
        return None
    start = min([points[0][0], *(a for _, a, _ in spans)])
    end = max([points[-1][0], *(b for _, _, b in spans)])
    constant = sum(float(memory.get(name) or 0) for name in BANDS)
    peak_s, peak = max(points, key=lambda point: point[1])
    highest = (constant + peak) * 1.12 or 1.0

    def x(seconds: float) -> float:
        return LEFT + (RIGHT - LEFT) * (seconds - start) / ((end - start) or 1.0)

    def y(size: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * size / highest

    chart = empty_chart(title, BOTTOM + 26, _note(memory))
    _phases(chart, spans, x)
    _bands(chart, memory, y)
    _transient(chart, [(x(t), y(constant + b)) for t, b in points], y(constant), x(end))
    _axes(chart, constant + peak, y, [(x(t), units.seconds(t - start)) for t in (start, (start + end) / 2, end)])
    told = f"peak {units.size(constant + peak)}"
    chart["dots"].append({"x": f"{x(peak_s):.1f}", "y": f"{y(constant + peak):.1f}", "r": 4, "color": MARK, "told": told})
    anchor = "end" if x(peak_s) > (LEFT + RIGHT) / 2 else "start"
    beside = -8 if anchor == "end" else 8
    chart["texts"].append({"x": f"{x(peak_s) + beside:.1f}", "y": f"{y(constant + peak) - 4:.1f}", "anchor": anchor, "told": told})
    return chart


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most about ``MOST_POINTS``, of each stretch its first and its highest: the peak stays."""
    points = sorted(points)
    every = math.ceil(2 * len(points) / MOST_POINTS)
    if every <= 2:
        return points
    stretches = [points[i : i + every] for i in range(0, len(points), every)]
    kept = [sorted({stretch[0], max(stretch, key=lambda point: point[1])}) for stretch in stretches]
    return [*(point for stretch in kept for point in stretch), points[-1]]


def _phases(chart: dict[str, Any], spans: Sequence[tuple[str, float, float]], x: Any) -> None:
    colors = looks(list(dict.fromkeys(name for name, _, _ in spans)))
    for name, begin, end in spans:
        left, right, told = x(begin), x(end), units.label(name)
        box = {"x": f"{left:.1f}", "y": TOP - 16, "w": f"{max(0.0, right - left):.1f}", "h": BOTTOM - TOP + 16}
        spent = f"{told}: {units.seconds(end - begin)}"
        chart["boxes"].append({**box, "color": colors[name].color, "opacity": 0.14, "told": spent})
        if right - left > ROOM_FOR_A_LETTER * len(told):
            chart["texts"].append({"x": f"{(left + right) / 2:.1f}", "y": TOP - 4, "anchor": "middle", "told": told})


def _bands(chart: dict[str, Any], memory: Mapping[str, Any], y: Any) -> None:
    below = 0.0
    for name, color in BANDS.items():
        size = float(memory.get(name) or 0)
        if size <= 0:
            continue
        told = f"{units.label(name)} {units.size(size)}"
        box = {"x": LEFT, "y": f"{y(below + size):.1f}", "w": f"{RIGHT - LEFT:.1f}", "h": f"{y(below) - y(below + size):.1f}"}
        chart["boxes"].append({**box, "color": color, "opacity": 0.85, "told": told})
        chart["key"].append({"color": color, "told": told})
        below += size


def _transient(chart: dict[str, Any], corners: Sequence[tuple[float, float]], floor: float, end: float) -> None:
    """A staircase: memory stays as it is until the next allocation."""
    path = [(corners[0][0], floor), corners[0]]
    for (_, before), (at, after) in pairwise(corners):
        path += [(at, before), (at, after)]
    path += [(end, corners[-1][1]), (end, floor)]
    told = "activations and workspace: what this step allocates"
    drawn = " ".join(f"{a:.1f},{b:.1f}" for a, b in path)
    chart["areas"].append({"points": drawn, "color": TRANSIENT, "opacity": 0.85, "told": told})
    chart["key"].append({"color": TRANSIENT, "told": "activations and workspace"})


def _axes(chart: dict[str, Any], peak: float, y: Any, times: Sequence[tuple[float, str]]) -> None:
    for size in (0.0, peak / 2, peak):
        line = {"x1": LEFT, "x2": RIGHT, "y1": f"{y(size):.1f}", "y2": f"{y(size):.1f}"}
        chart["lines"].append({**line, "color": QUIET, "width": 0.5, "told": ""})
        chart["texts"].append({"x": LEFT - 8, "y": f"{y(size) + 4:.1f}", "anchor": "end", "told": units.size(size)})
    for (at, told), anchor in zip(times, ("start", "middle", "end"), strict=True):
        chart["texts"].append({"x": f"{at:.1f}", "y": BOTTOM + 18, "anchor": anchor, "told": told})


def _note(memory: Mapping[str, Any]) -> str:
    said = []
    if memory.get("process_bytes"):
        said.append(f"The whole process holds {units.size(memory['process_bytes'])}.")
    if (memory.get("growth_bytes_per_step") or 0) > units.GROWTH_BYTES:
        said.append(f"It grows by {units.size(memory['growth_bytes_per_step'])} a step.")
    return " ".join(said)
