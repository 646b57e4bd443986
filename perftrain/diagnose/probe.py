"""Counterfactuals: the program in turns as it is and without something; what a block says beside its neighbours."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ASIDE = ("data_wait", "evaluation", "checkpoint")
"""Phases that the counterfactuals of computing leave alone: they only add scatter."""


@dataclass(frozen=True)
class Probe:
    """A counterfactual, measured: how many times as fast the program was."""

    name: str
    speedup: float
    low: float
    high: float
    blocks: int
    error: str = ""


def probes_of(process: Mapping[str, Any], names: Sequence[str]) -> dict[str, Probe]:
    """Each probe against the baseline blocks on both sides of its own blocks, as the speedup of the whole step."""
    kinds, rows, phases = process.get("kinds") or [], process["rows"], process["phases"]
    found = {}
    for name in names:
        aside = [3 + 3 * phases.index(p) for p in ASIDE if p in phases] if name not in ("cached_batches", "short_batches") else []
        ratios, fixed = ratios_of(name, kinds, rows, aside)
        error = (process.get("probe_errors") or {}).get(name, "")
        if ratios and not error:
            center = statistics.median(ratios)
            spread = statistics.stdev(ratios) / math.sqrt(len(ratios)) * 2.2 if len(ratios) > 1 else 0.15
            whole = [1 / (fixed + (1 - fixed) / math.exp(center + shift)) for shift in (0.0, -spread, spread)]
            found[name] = Probe(name, whole[0], whole[1], whole[2], len(ratios))
        elif error:
            found[name] = Probe(name, 1.0, 1.0, 1.0, 0, error)
    return found


def ratios_of(name: str, kinds: Sequence[str], rows: Sequence[Sequence[float]], aside: Sequence[int]) -> tuple[list[float], float]:
    """Log ratios baseline / probe of neighbouring blocks without the phases ``aside``, and the baseline's share of those phases."""
    blocks: list[tuple[str, list[float]]] = []
    fixed = total = 0.0
    for kind, row in zip(kinds, rows, strict=False):
        whole, left_out = sum(row[3::3]), sum(row[i] for i in aside)
        if kind == "baseline":
            fixed, total = fixed + left_out, total + whole
        if blocks and blocks[-1][0] == kind:
            blocks[-1][1].append(whole - left_out)
        else:
            blocks.append((kind, [whole - left_out]))
    means = [(kind, _typical(times)) for kind, times in blocks if kind != "warm"]
    ratios = []
    for i, (kind, value) in enumerate(means):
        beside = [means[j][1] for j in (i - 1, i + 1) if 0 <= j < len(means) and means[j][0] == "baseline"]
        if kind == name and beside and value > 0:
            ratios.append(math.log(statistics.fmean(beside) / value))
    return ratios, fixed / total if total else 0.0


def _typical(times: Sequence[float]) -> float:
    """The mean, unless one step of the block stands far out by itself."""
    if len(times) < 3:
        return statistics.fmean(times)
    return statistics.fmean(sorted(times)[: len(times) - 1]) if max(times) > 5 * statistics.median(times) else statistics.fmean(times)
