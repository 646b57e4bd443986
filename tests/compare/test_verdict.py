"""The decision rule, break-even and the order of a ranking."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perftrain.compare.duet import Protocol
from perftrain.compare.verdict import break_even, changes_result, decide, does_not_run
from perftrain.facts import ArmSummary, Decision, Numerics, Parity, PerftrainError, StepBreakdown, Verdict, ranked
from perftrain.measure.statistics import Estimate

HOLDS = Parity(Numerics.CLOSE, True, 5, 0.01, 0.05, "within")


def arm(step_s: float = 0.01, warmup_s: float = 1.0) -> ArmSummary:
    return ArmSummary(StepBreakdown({"forward": step_s}, steps=10, samples=10), None, warmup_s)


def seen(speedup: float, low: float, high: float, resolution: float = 0.02) -> Estimate:
    return Estimate(speedup, low, high, resolution, 0.01, 24, 3)


def judged(found: Estimate, parity: Parity = HOLDS) -> Verdict:
    return decide(["x"], found, parity, arm(), arm(), Protocol())


@pytest.mark.parametrize(
    ("found", "decision"),
    [
        (seen(1.3, 1.25, 1.35), Decision.FASTER),
        (seen(0.8, 0.78, 0.83), Decision.SLOWER),
        (seen(1.0, 0.99, 1.01), Decision.NO_DIFFERENCE),
        (seen(1.005, 1.001, 1.009, 0.005), Decision.NO_DIFFERENCE),  # significant, but under min_effect
        (seen(0.995, 0.991, 0.999, 0.005), Decision.NO_DIFFERENCE),
        (seen(1.1, 0.9, 1.3, 0.3), Decision.NOT_RESOLVED),
        (seen(1.5, 1.2, 1.9, 0.3), Decision.FASTER),  # a wide interval that excludes 1 is an answer
    ],
)
def test_decisions(found: Estimate, decision: Decision) -> None:
    verdict = judged(found)
    assert verdict.decision is decision
    assert verdict.speedup == found.speedup
    assert verdict.ci95 == (found.low, found.high)
    assert verdict.resolution == max(found.resolution, Protocol().min_effect)  # smaller ones are not called effects
    assert (verdict.pairs, verdict.processes) == (24, 3)
    assert verdict.reason


def test_what_changes_the_result_is_not_faster() -> None:
    verdict = judged(seen(2.0, 1.9, 2.1), replace(HOLDS, holds=False, detail="losses differ"))
    assert verdict.decision is Decision.CHANGES_RESULT
    assert verdict.reason.startswith("losses differ")
    assert "2.0" in verdict.reason


def test_what_changes_it_on_purpose_is_judged_by_speed() -> None:
    parity = replace(HOLDS, numerics=Numerics.CHANGED, holds=False)
    assert judged(seen(2.0, 1.9, 2.1), parity).decision is Decision.FASTER


def test_no_difference_names_what_would_have_been_seen() -> None:
    assert "2.0%" in judged(seen(1.0, 0.99, 1.01)).reason
    assert "--budget" in judged(seen(1.0, 0.8, 1.2, 0.3)).reason


def test_while_others_were_busy_an_effect_counts_only_if_it_would_be_seen_nine_times_in_ten() -> None:
    def disturbed(found: Estimate) -> Decision:
        return decide(["x"], found, HOLDS, arm(), arm(), Protocol(), disturbed=True).decision

    by_luck = seen(1.51, 1.10, 2.07, 0.64)  # six rounds of a program with itself beside bursts of another one
    assert judged(by_luck).decision is Decision.FASTER
    assert disturbed(by_luck) is disturbed(seen(0.66, 0.48, 0.91, 0.64)) is Decision.NOT_RESOLVED
    assert disturbed(seen(1.03, 1.01, 1.05, 0.04)) is Decision.NOT_RESOLVED
    assert disturbed(seen(2.5, 1.6, 3.9, 0.9)) is Decision.FASTER
    assert disturbed(seen(0.9, 0.87, 0.93, 0.05)) is Decision.SLOWER
    assert disturbed(seen(1.0, 0.98, 1.02, 0.04)) is Decision.NO_DIFFERENCE


def test_break_even() -> None:
    assert break_even(arm(0.01, 1.0), arm(0.005, 6.0), 2.0) == pytest.approx(1000)
    assert break_even(arm(0.01, 1.0), arm(0.005, 0.5), 2.0) is None  # nothing to pay back
    assert break_even(arm(0.01, 1.0), arm(0.02, 6.0), 0.5) is None  # never paid back


def test_a_gain_that_is_not_proved_pays_nothing_back() -> None:
    for found, pays in ((seen(1.3, 1.2, 1.4), True), (seen(1.01, 0.97, 1.05), False)):
        verdict = decide(["compile"], found, HOLDS, arm(), arm(0.01 / found.speedup, 6.0), Protocol())
        assert (verdict.break_even_steps is not None) == pays


def test_ranking_is_by_decision_then_by_the_lower_end() -> None:
    some = [
        does_not_run(["f"], "no"), changes_result(["e"], "nan", None), judged(seen(0.8, 0.78, 0.83)),
        judged(seen(1.0, 0.99, 1.01)), judged(seen(1.2, 1.1, 1.3)), judged(seen(1.4, 1.05, 1.8)),
    ]  # fmt: skip
    assert [v.decision.value for v in ranked(some)] == [
        "faster", "faster", "no_difference", "slower", "changes_result", "does_not_run"]  # fmt: skip
    assert ranked(some)[0].speedup == 1.2


@pytest.mark.parametrize(
    "bad",
    [{"processes": 0}, {"budget_s": 0}, {"parity_seeds": 0}, {"parity_steps": 1}, {"budget_s": float("inf")}, {"max_cycles": 0}],
)
def test_a_protocol_that_measures_nothing_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(PerftrainError, match=rf"measure\.{next(iter(bad))} .* it was .* Try measure\."):
        Protocol(**bad)  # type: ignore[arg-type]
