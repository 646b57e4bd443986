"""Turns that other programs disturbed are set aside for what those did, not for what was timed."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from perftrain.compare import duet
from perftrain.compare.duet import BASELINE, VARIANT, Protocol, Timing, time_arms

SAME = {BASELINE: {"A": "1"}, VARIANT: {"A": "1"}}


class Clockwork:
    """A worker whose variant takes half the time, and five times as long while somebody disturbs it."""

    busy = itertools.cycle([False])
    disturbed = False

    def __init__(self, spec: Any, environment: Any) -> None: ...
    def __enter__(self) -> Clockwork:
        return self

    def __exit__(self, *_: object) -> None: ...

    def call(self, do: str, arm: str = "", **_: Any) -> dict[str, Any]:
        if do == "build":
            return {"step_s": 0.02}
        seconds = {BASELINE: 0.1, VARIANT: 0.05}.get(arm, 0.0)
        if arm == VARIANT and Clockwork.disturbed:
            seconds *= 5
        return {"seconds": seconds, "steps": 5, "samples": 10, "phase_s": {"forward": seconds}}


@pytest.fixture
def clockwork(monkeypatch: pytest.MonkeyPatch) -> None:
    now, others, ask = itertools.count(0.0, 0.1), [0.0], itertools.count()

    def others_s() -> float:
        if next(ask) % 2:  # before a pair, behind a pair; the very first call stands for the whole measurement
            Clockwork.disturbed = next(Clockwork.busy)
        else:
            others[0] += 1.0 if Clockwork.disturbed else 0.0
        return others[0]

    monkeypatch.setattr(duet, "Worker", Clockwork)
    monkeypatch.setattr(duet, "others_s", others_s)
    monkeypatch.setattr(duet.time, "monotonic", lambda: next(now))


@pytest.mark.usefixtures("clockwork")
@pytest.mark.parametrize("busy", [[False], [False, True, True], [True, True, False, True]])
def test_disturbed_turns_do_not_count(busy: list[bool]) -> None:
    Clockwork.busy = itertools.cycle(busy)
    timing = time_arms({}, SAME, Protocol(budget_s=30, processes=5))
    assert timing.chooses()
    assert timing.estimate().speedup == pytest.approx(2.0)
    assert timing.disturbed_share() == pytest.approx(sum(busy) / len(busy), abs=0.05)
    assert timing.summary(VARIANT, None, 0.0).breakdown.step_s == pytest.approx(0.01)


@pytest.mark.usefixtures("clockwork")
def test_where_it_is_never_quiet_every_turn_counts() -> None:
    Clockwork.busy = itertools.cycle([True])
    timing = time_arms({}, SAME, Protocol(budget_s=30, processes=5))
    assert not timing.chooses()
    assert timing.estimate().speedup == pytest.approx(0.4)
    assert timing.disturbed_share() == 1.0


def test_few_quiet_processes_are_not_enough() -> None:
    timing = Timing(groups=[[0.5, 0.5]] * 6, quiet=[[0.1]] * 4 + [[], []])
    assert timing.estimate().speedup == pytest.approx(math.exp(0.5))
    assert Timing(groups=[[0.5, 0.5]] * 6, quiet=[[0.1]] * 5 + [[]]).estimate().speedup == pytest.approx(math.exp(0.1))
