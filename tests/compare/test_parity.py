"""Losses against the baseline's: EXACT bit for bit, CLOSE within what seeds do."""

from __future__ import annotations

import math

import pytest

from perftrain.compare.parity import judge, seeds_envelope
from perftrain.facts import Numerics

FIRST = [2.3, 2.2, 2.1, 2.0, 1.9, 1.8]
BASELINE = {"0": FIRST, "1": [x + 0.05 for x in FIRST], "2": [x - 0.02 for x in FIRST]}


def shifted(by: float) -> list[float]:
    return [x + by for x in FIRST]


@pytest.mark.parametrize("numerics", list(Numerics))
def test_equal_losses_hold_in_every_class(numerics: Numerics) -> None:
    parity = judge(numerics, FIRST, BASELINE)
    assert parity.holds
    assert parity.distance == 0
    assert "bit for bit" in parity.detail


def test_exact_fails_on_the_last_bit_and_names_the_step() -> None:
    variant = [*FIRST[:3], math.nextafter(FIRST[3], 9), *FIRST[4:]]
    parity = judge(Numerics.EXACT, variant, BASELINE)
    assert not parity.holds
    assert parity.detail == "losses must be equal bit for bit; they part at step 3"
    assert not judge(Numerics.EXACT, variant, BASELINE, repeat=FIRST).holds


def test_a_program_that_does_not_repeat_itself_is_not_asked_for_bits() -> None:
    repeat = shifted(1e-6)
    near, far = (judge(Numerics.EXACT, shifted(by), BASELINE, repeat) for by in (2e-6, 1e-3))
    assert near.holds
    assert "does not repeat" in near.detail
    assert not far.holds


def test_close_is_within_the_envelope_of_the_seeds() -> None:
    assert seeds_envelope(BASELINE) == pytest.approx(0.07)
    assert judge(Numerics.CLOSE, shifted(0.06), BASELINE).holds
    outside = judge(Numerics.CLOSE, shifted(0.08), BASELINE)
    assert not outside.holds
    assert "outside" in outside.detail


def test_changed_says_so() -> None:
    parity = judge(Numerics.CHANGED, shifted(1.0), BASELINE)
    assert "on purpose" in parity.detail
    assert not parity.holds


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("numerics", list(Numerics))
def test_what_is_not_finite_never_holds(numerics: Numerics, bad: float) -> None:
    parity = judge(numerics, [*FIRST[:-1], bad], BASELINE)
    assert not parity.holds
    assert "NaN" in parity.detail


def test_no_losses_do_not_hold() -> None:
    assert not judge(Numerics.CLOSE, [], BASELINE).holds


def test_one_seed_spans_no_envelope() -> None:
    assert seeds_envelope({"0": FIRST}) == 0.0
    assert not judge(Numerics.CLOSE, shifted(1e-6), {"0": FIRST}).holds
