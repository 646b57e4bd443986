"""The roofline: what the machine can do at each intensity, and where the program stands below it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from perftrain.report import units
from perftrain.report.charts import GOOD, MARK, QUIET, WIDTH, empty_chart

LEFT, TOP, RIGHT, BOTTOM = 92.0, 14.0, WIDTH - 20.0, 262.0
ROOFS = ("#0072B2", "#CC79A7", "#56B4E9", "#E69F00")
POINTS = {"": MARK, "before": MARK, "after": GOOD}


def roofline(programs: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """The drawing; None where what it takes was not measured.

    Args:
        programs: the diagnosis' ``roofline`` by the name of its point, as ``{"before": ..., "after": ...}`` or ``{"": ...}``.
    """
    points = {name: (r["flop"] / r["bytes"], r["flop"] / r["seconds"], r) for name, r in programs.items() if r and _whole(r)}
    if not points:
        return None
    machine = next(r["peaks"] for _, _, r in points.values())
    memory = machine["memory"]["amount"] / machine["memory"]["seconds"]
    roofs = {dtype: rate for dtype, peak in machine["flop"].items() if (rate := units.rate(peak["amount"], peak["seconds"]))}
    ridges = [rate / memory for rate in roofs.values()]
    xs, ys = [x for x, _, _ in points.values()], [y for _, y, _ in points.values()]
    axes = _Axes(
        (min(*xs, *ridges) / 8, max(*xs, *ridges) * 8), (min(*ys, memory * min(*xs, *ridges)) / 3, 2.5 * max(*ys, *roofs.values()))
    )
    chart = empty_chart("Roofline", BOTTOM + 44, " ".join(_in_words(name, r, memory) for name, (_, _, r) in points.items()))
    axes.draw(chart)
    low, high = axes.xs
    for number, (dtype, rate) in enumerate(sorted(roofs.items(), key=lambda roof: -roof[1])):
        color, told = ROOFS[number % len(ROOFS)], f"{dtype}: {units.flops(rate, 1.0)}"
        axes.line(chart, (max(low, rate / memory), rate), (high, rate), color, told)
        chart["texts"].append({"x": RIGHT - 4, "y": axes.y(rate) - 6, "anchor": "end", "told": told})
        chart["key"].append({"color": color, "told": told})
    top = min(max(roofs.values()), memory * high)
    axes.line(chart, (max(low, axes.ys[0] / memory), memory * max(low, axes.ys[0] / memory)), (top / memory, top), QUIET,
              f"memory: {units.bandwidth(memory, 1.0)}")  # fmt: skip
    chart["key"].append({"color": QUIET, "told": f"memory, {units.bandwidth(memory, 1.0)}"})
    for name, (x, y, r) in points.items():
        told = f"{name or 'this program'}: {units.flops(y, 1.0)} at {units.three(x)} FLOP/B in {r['dtype']}"
        chart["dots"].append({"x": f"{axes.x(x):.1f}", "y": f"{axes.y(y):.1f}", "r": 6, "color": POINTS.get(name, MARK), "told": told})
        chart["key"].append({"color": POINTS.get(name, MARK), "told": told})
    return chart


def _whole(raw: Mapping[str, Any]) -> bool:
    """Is everything there, and are the numbers such as have a logarithm."""
    peaks = raw.get("peaks") or {}
    memory = peaks.get("memory") or {}
    found = [raw.get("flop"), raw.get("bytes"), raw.get("seconds"), units.rate(memory.get("amount"), memory.get("seconds"))]
    return all(isinstance(v, int | float) and 0 < v < math.inf for v in found) and any(
        units.rate(p.get("amount"), p.get("seconds")) for p in (peaks.get("flop") or {}).values()
    )


def _in_words(name: str, raw: Mapping[str, Any], memory: float) -> str:
    """How near the program comes to what is possible at its intensity, and what holds it."""
    speed, intensity = raw["flop"] / raw["seconds"], raw["flop"] / raw["bytes"]
    subject = f"{name.capitalize()}: forward and backward" if name else "Forward and backward"
    parts = [f"{subject} compute at {units.flops(speed, 1.0)}"]
    if units.known(raw.get("mfu")):
        parts.append(f"{units.share(raw['mfu'])} of the {raw['dtype']} peak that was measured here (MFU)")
    peak = (raw["peaks"]["flop"] or {}).get(raw["dtype"])
    if peak:
        rate = peak["amount"] / peak["seconds"]
        held = "memory" if memory * intensity < rate else "arithmetic"
        parts.append(f"{units.share(speed / min(rate, memory * intensity))} of what {held} allows at {units.three(intensity)} FLOP/B")
    return ", ".join(parts) + "."


class _Axes:
    """Two logarithmic axes and where values lie on them."""

    def __init__(self, xs: tuple[float, float], ys: tuple[float, float]) -> None:
        self.xs, self.ys = xs, ys

    def x(self, value: float) -> float:
        low, high = self.xs
        return LEFT + (RIGHT - LEFT) * math.log(value / low) / math.log(high / low)

    def y(self, value: float) -> float:
        low, high = self.ys
        return BOTTOM - (BOTTOM - TOP) * math.log(value / low) / math.log(high / low)

    def line(self, chart: dict[str, Any], start: tuple[float, float], end: tuple[float, float], color: str, told: str) -> None:
        (x1, y1), (x2, y2) = start, end
        ends = {"x1": self.x(x1), "y1": self.y(y1), "x2": self.x(x2), "y2": self.y(y2)}
        chart["lines"].append({**{k: f"{v:.1f}" for k, v in ends.items()}, "color": color, "width": 2, "told": told})

    def draw(self, chart: dict[str, Any]) -> None:
        """Lines at powers of ten, labelled."""
        for value in _tens(*self.xs):
            self._grid(chart, self.x(value), self.x(value), TOP, BOTTOM)
            chart["texts"].append({"x": f"{self.x(value):.1f}", "y": BOTTOM + 18, "anchor": "middle", "told": units.three(value)})
        for value in _tens(*self.ys):
            self._grid(chart, LEFT, RIGHT, self.y(value), self.y(value))
            chart["texts"].append({"x": LEFT - 8, "y": f"{self.y(value) + 4:.1f}", "anchor": "end", "told": units.flops(value, 1.0)})
        chart["texts"].append({"x": (LEFT + RIGHT) / 2, "y": BOTTOM + 38, "anchor": "middle", "told": "FLOP for each byte that is moved"})

    def _grid(self, chart: dict[str, Any], x1: float, x2: float, y1: float, y2: float) -> None:
        ends = {"x1": f"{x1:.1f}", "y1": f"{y1:.1f}", "x2": f"{x2:.1f}", "y2": f"{y2:.1f}"}
        chart["lines"].append({**ends, "color": QUIET, "width": 0.3, "told": ""})


def _tens(low: float, high: float) -> list[float]:
    return [10.0**n for n in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
