"""Did the training stay the same? Losses against the baseline's, bit for bit or within what seeds do."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from perftrain.facts import Numerics, Parity


def judge(
    numerics: Numerics,
    variant: Sequence[float],
    baseline: Mapping[str, Sequence[float]],
    repeat: Sequence[float] | None = None,
) -> Parity:
    """Compare the variant's losses with the baseline's.

    Args:
        variant: losses of the first steps, with the first of the baseline's seeds.
        baseline: seed -> losses of the same steps; the first one has the variant's seed and batches.
        repeat: the baseline's first seed once more, in another process; it tells whether the program repeats itself at all.
    """
    first = next(iter(baseline.values()))
    steps = min(len(variant), len(first))
    if not steps or not all(map(math.isfinite, variant)):
        return Parity(numerics, False, len(variant), math.inf, 0.0, "the variant's loss became NaN or infinite")
    distance = _distance(variant, first)
    envelope = seeds_envelope(baseline)
    if list(variant[:steps]) == list(first[:steps]):
        return Parity(numerics, True, steps, 0.0, envelope, f"equal bit for bit over {steps} steps")
    if numerics is Numerics.EXACT:
        return _exact(variant, first, repeat, steps, distance, envelope)
    holds = distance <= envelope
    relation = "within" if holds else "outside"
    detail = f"losses differ by {distance:.2g} (rms over {steps} steps), {relation} the {envelope:.2g} that seeds differ by"
    if numerics is Numerics.CHANGED:
        detail += "; it changes the training on purpose, so compare final quality before you keep it"
    return Parity(numerics, holds, steps, distance, envelope, detail)


def _exact(
    variant: Sequence[float], first: Sequence[float], repeat: Sequence[float] | None, steps: int, distance: float, envelope: float
) -> Parity:
    own = _distance(repeat, first) if repeat is not None else 0.0
    if own > 0:  # the program does not repeat itself: then equal bits cannot be asked of the variant
        holds = distance <= 4 * own
        detail = f"the program itself does not repeat its losses bit for bit (rms {own:.2g}); the variant differs by {distance:.2g}"
        return Parity(Numerics.EXACT, holds, steps, distance, envelope, detail)
    at = next(i for i, (a, b) in enumerate(zip(variant, first, strict=False)) if a != b)
    return Parity(Numerics.EXACT, False, steps, distance, envelope, f"losses must be equal bit for bit; they part at step {at}")


def seeds_envelope(baseline: Mapping[str, Sequence[float]]) -> float:
    """The largest distance between two of the baseline's seeds."""
    return max((_distance(a, b) for a, b in itertools.combinations(baseline.values(), 2)), default=0.0)


def _distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Root mean square difference of the losses, smoothed over a sixth of the steps."""
    steps = min(len(a), len(b))
    if not steps:
        return math.inf
    window = max(1, steps // 6)
    kernel = np.ones(window) / window
    smooth_a, smooth_b = (np.convolve(np.asarray(x[:steps], dtype=float), kernel, mode="valid") for x in (a, b))
    return float(np.sqrt(np.mean((smooth_a - smooth_b) ** 2)))
