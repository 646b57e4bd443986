"""A delay that is planted into one phase of a recipe is found in that phase, and in proportion."""

from __future__ import annotations

import pytest

from perftrain.attach.launch import watch
from perftrain.attach.orders import Orders
from perftrain.diagnose.seen import Seen
from perftrain.facts import StepBreakdown

RECIPE = ("-m", "perftrain.recipe_program", "recipe=digits", "recipe.hidden=512")
FRACTION = 1.0
PLANTED = {"data": "data_wait", "forward": "forward", "backward": "backward", "optimizer": "optimizer"}


def observed(*overrides: str) -> StepBreakdown:
    orders = Orders(observe_s=1.0, least_steps=100, most_s=6.0, trace=False)
    found = watch((*RECIPE, *overrides), orders, lambda steps, s: None, 90, quiet=True)
    assert found.code == 0, found.error
    return Seen(found.processes[0]).breakdown()


@pytest.fixture(scope="module")
def plain() -> StepBreakdown:
    return observed()


@pytest.mark.slow
@pytest.mark.parametrize("phase", PLANTED)
def test_the_extra_time_is_in_the_delayed_phase(phase: str, plain: StepBreakdown) -> None:
    delayed = observed("+opt=delay", f"opt.delay.fraction={FRACTION}", f"opt.delay.phase={phase}")
    for name in PLANTED.values():
        extra = FRACTION if name == PLANTED[phase] else 0.0
        expected = (plain.share(name) + extra) / (1 + FRACTION)
        assert delayed.share(name) == pytest.approx(expected, abs=0.08), (name, plain.phase_s, delayed.phase_s)
