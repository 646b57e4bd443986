"""The statistics of a comparison: warm-up cut, paired log ratios in rounds and processes, interval, resolution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def warmup_cut(step_s: Sequence[float]) -> int:
    """How many first steps are warm-up: at least one, at most half.

    The truncation point that minimises the standard error of the rest's mean (MSER; White, "An Effective Truncation
    Heuristic for Bias Reduction in Simulation Output", Simulation 69(6), 1997), on values clipped at one and a half
    times the median of the second half, so that one late hiccup does not push the cut behind itself.
    """
    count = len(step_s)
    if count < 4:
        return min(1, max(0, count - 1))
    values = np.asarray(step_s, dtype=float)
    half = count // 2
    values = np.minimum(values, 1.5 * np.median(values[half:]))
    scores = [values[cut:].var() / (count - cut) for cut in range(half + 1)]
    return max(1, int(np.argmin(scores)))


@dataclass(frozen=True)
class Estimate:
    """A speedup with its interval, from log ratios of rounds nested in processes.

    ``resolution`` is the smallest relative effect that would have been seen (significant at 5 %) nine times in ten.
    """

    speedup: float
    low: float
    high: float
    resolution: float
    standard_error: float
    """Of the log of the speedup."""
    rounds: int
    processes: int


def estimate(groups: Sequence[Sequence[float]], floor: float = 0.0, confidence: float = 0.95) -> Estimate:
    """Mean and interval of paired log ratios ``log(baseline / variant)``.

    Each group is one fresh process (or pair of processes), and the groups are what is replicated: Student's t on their
    trimmed means, with one degree of freedom less than there are groups. By luck the means may lie closer together than the
    rounds within them allow; then the standard error is that of the rounds (trimmed by 20 %, winsorised variance; Yuen,
    Biometrika 61(1), 1974). A single group has only its rounds. ``floor`` is the part of the standard error that no
    repetition removes.

    Raises:
        ValueError: fewer than two rounds.
    """
    from scipy import stats  # half a second to import, and a training loop does not need it

    groups = [g for g in groups if len(g)]
    count = sum(len(g) for g in groups)
    if count < 2:
        raise ValueError(f"an interval needs at least two rounds; there are {count}")
    pooled_variance, pooled_df, kept = _within(groups)
    means = np.array([stats.trim_mean(g, 0.2) for g in groups])
    center = float(means.mean())
    within = pooled_variance / kept
    between = float(means.var(ddof=1)) / len(groups) if len(groups) > 1 else 0.0
    variance, df = max(within, between), len(groups) - 1 if len(groups) > 1 else pooled_df
    error = math.sqrt(variance + floor**2)
    t = float(stats.t.ppf(0.5 + confidence / 2, df))
    t_power = float(stats.t.ppf(0.9, df))
    return Estimate(
        speedup=math.exp(center),
        low=math.exp(center - t * error),
        high=math.exp(center + t * error),
        resolution=math.expm1((t + t_power) * error),
        standard_error=error,
        rounds=count,
        processes=len(groups),
    )


def _within(groups: Sequence[Sequence[float]]) -> tuple[float, int, float]:
    """Variance of a round's log ratio within its process, degrees of freedom, and how many rounds the trimmed means keep.

    Deviations from the groups' own trimmed means are pooled and winsorised together, so that small groups count too.
    """
    from scipy import stats

    deviations = np.concatenate([np.asarray(g, dtype=float) - stats.trim_mean(g, 0.2) for g in groups])
    count = len(deviations)
    cut = int(0.2 * count)
    ordered = np.sort(deviations)
    winsorised = np.clip(ordered, ordered[cut], ordered[count - cut - 1])
    kept = count - 2 * cut
    df = max(1, kept - len(groups))
    # Yuen: variance of a trimmed mean = winsorised sum of squares / (kept (kept - 1)); here as variance-per-round times 1/kept.
    return float((winsorised**2).sum()) / df, df, float(kept)
