"""The statistics of a comparison: warm-up cut, paired log ratios in rounds and processes, interval, resolution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


def warmup_cut(step_s: Sequence[float]) -> int:
    """How many first steps are warm-up: at least one, at most half.

    The truncation point that minimises the standard error of the rest's mean (MSER; White, "An Effective Truncation
    Heuristic for Bias Reduction in Simulation Output", Simulation 69(6), 1997), on values clipped at three times the
    median so that one late hiccup does not push the cut behind itself.
    """
    count = len(step_s)
    if count < 4:
        return min(1, max(0, count - 1))
    values = np.asarray(step_s, dtype=float)
    values = np.minimum(values, 3 * np.median(values))
    half = count // 2
    scores = [values[cut:].var() / (count - cut) for cut in range(half + 1)]
    return max(1, int(np.argmin(scores)))
