"""The control must cost what it says: on a made-up clock its waits add up to the fraction that was asked for."""

import pytest

from perftrain.opt import delay

STEP_S, TICK_S = 1e-3, 3e-6


@pytest.mark.parametrize("fraction", [0.01, 0.03, 0.1, 1.0])
def test_the_waits_add_up_to_the_fraction(monkeypatch: pytest.MonkeyPatch, fraction: float) -> None:
    now_s = 0.0

    def clock() -> float:  # looking costs time, so every single wait ends late
        nonlocal now_s
        now_s += TICK_S
        return now_s

    def step() -> None:
        nonlocal now_s
        now_s += STEP_S

    monkeypatch.setattr(delay, "perf_counter", clock)
    late = delay.delayed(step, fraction)
    late()
    begin_s, steps = now_s, 2000
    for _ in range(steps):
        late()
    own_s = steps * (STEP_S + TICK_S)
    assert now_s - begin_s - own_s == pytest.approx(fraction * own_s, rel=1e-3, abs=2 * TICK_S)


def test_a_pause_of_the_program_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 1e-7
        return now_s

    def step() -> None:
        nonlocal now_s
        now_s += STEP_S

    monkeypatch.setattr(delay, "perf_counter", clock)
    late = delay.delayed(step, 0.5)
    for _ in range(5):
        late()
    now_s += 10.0
    begin_s = now_s
    late()
    assert now_s - begin_s == pytest.approx(1.5 * STEP_S, rel=1e-2)
