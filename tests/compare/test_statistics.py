"""The interval covers the truth as often as it says, whatever the rounds' distribution and however processes scatter."""

from __future__ import annotations

import math

import numpy as np
import pytest

from perftrain.compare.duet import Protocol
from perftrain.compare.verdict import decide
from perftrain.facts import ArmSummary, Decision, Numerics, Parity, StepBreakdown
from perftrain.measure.statistics import Estimate, estimate

SIMULATIONS = 400
ROUND_SD = 0.03


def rounds(rng: np.random.Generator, effect: float, kind: str, between: float, processes: int, each: int) -> list[list[float]]:
    """Log ratios as a comparison measures them: ``between`` is the sd of what a process adds to all its rounds."""
    groups = []
    for _ in range(processes):
        noise = rng.standard_t(3, each) / math.sqrt(3) if kind == "heavy" else rng.standard_normal(each)
        groups.append(list(effect + rng.normal(0, between) + ROUND_SD * noise))
    return groups


def verdict_of(found: Estimate) -> Decision:
    arm = ArmSummary(StepBreakdown({"forward": 1.0}, steps=1, samples=1), None, 0.0)
    parity = Parity(Numerics.EXACT, True, 5, 0.0, 0.1, "equal")
    return decide(["x"], found, parity, arm, arm, Protocol()).decision


@pytest.mark.parametrize("kind", ["normal", "heavy"])
@pytest.mark.parametrize("between", [0.0, 0.005, 0.02])
@pytest.mark.parametrize(("processes", "each"), [(3, 8), (5, 5), (9, 3)])
def test_the_interval_covers_and_aa_is_rarely_called_a_difference(kind: str, between: float, processes: int, each: int) -> None:
    rng = np.random.default_rng(20260101)
    truth = math.log(1.05)
    covered = wrong = 0
    for _ in range(SIMULATIONS):
        found = estimate(rounds(rng, truth, kind, between, processes, each))
        covered += math.log(found.low) <= truth <= math.log(found.high)
        same = estimate(rounds(rng, 0.0, kind, between, processes, each))
        wrong += verdict_of(same) in (Decision.FASTER, Decision.SLOWER)
    assert covered / SIMULATIONS >= 0.93
    assert wrong / SIMULATIONS <= 0.05


def test_an_interval_needs_two_rounds_and_two_give_a_wide_one() -> None:
    for groups in ([], [[0.1]], [[], [0.1]]):
        with pytest.raises(ValueError, match="at least two rounds"):
            estimate(groups)
    found = estimate([[0.0, 0.02]])
    assert found.rounds == 2
    assert found.processes == 1
    assert found.low < 0.95 < 1.05 < found.high


def test_resolution_shrinks_with_rounds_and_is_reached() -> None:
    rng = np.random.default_rng(1)
    few, many = (np.median([estimate(rounds(rng, 0, "normal", 0, 3, n)).resolution for _ in range(50)]) for n in (5, 40))
    assert many < few / 2
    # an effect of the size of the resolution is seen about nine times in ten
    seen = [estimate(rounds(rng, math.log1p(many), "normal", 0, 3, 40)).low > 1 for _ in range(200)]
    assert np.mean(seen) >= 0.8


def test_one_wild_round_does_not_move_the_estimate() -> None:
    groups = [[0.05 + 0.001 * i for i in range(-4, 5)], [0.05 + 0.001 * i for i in range(-4, 5)]]
    calm = estimate(groups)
    groups[0][0] = -3.0
    assert abs(math.log(estimate(groups).speedup / calm.speedup)) < 0.002


def test_the_floor_widens() -> None:
    groups = [[0.05, 0.051, 0.049, 0.05]] * 3
    assert estimate(groups, floor=0.02).resolution > 0.04 > estimate(groups).resolution
