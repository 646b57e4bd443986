"""Stretches of time as sorted, disjoint (begin, end) pairs in seconds, and the few things that are done with them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]
Intervals = Sequence[Interval]


def union(parts: Iterable[Interval]) -> list[Interval]:
    """Any stretches, sorted, those that touch as one."""
    merged: list[Interval] = []
    for begin, end in sorted(parts):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > begin:
            merged.append((begin, end))
    return merged


def intersect(one: Intervals, other: Intervals) -> list[Interval]:
    """What lies in both."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(parts: Intervals, taken: Intervals) -> list[Interval]:
    """``parts`` where ``taken`` is not."""
    if not parts:
        return []
    low, high = parts[0][0], parts[-1][1]
    borders = [low, *(t for hole in taken if hole[1] > low and hole[0] < high for t in hole), high]
    return intersect(parts, [(a, b) for a, b in zip(borders[::2], borders[1::2], strict=True) if a < b])


def total(parts: Intervals) -> float:
    return sum(end - begin for begin, end in parts)


def overlap(parts: Intervals, begin: float, end: float) -> float:
    """Seconds of ``parts`` between ``begin`` and ``end``."""
    spent = 0.0
    for i in range(max(0, bisect_right(parts, (begin, begin)) - 1), len(parts)):
        if parts[i][0] >= end:
            break
        spent += max(0.0, min(parts[i][1], end) - max(parts[i][0], begin))
    return spent


def holds(parts: Intervals, moment: float) -> bool:
    """Whether ``moment`` lies in one of ``parts``."""
    i = bisect_right(parts, (moment, float("inf"))) - 1
    return i >= 0 and parts[i][0] <= moment <= parts[i][1]
