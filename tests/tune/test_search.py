"""The closed loop against a program that only exists as numbers: it must find what is best, keep nothing else, and say why."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from perftrain.facts import Bottleneck, Cause, Decision, Diagnosis, Numerics, Parity, StepBreakdown, Try, Verdict
from perftrain.tune.search import Settings, Switches, tune


class Made:
    """A step of loading and computing, and what each switch does to them (seconds)."""

    def __init__(
        self, effects: dict[str, tuple[float, float]], changes: Sequence[str] = (), numbers: dict[str, list[str]] | None = None
    ) -> None:
        self.effects, self.changes, self.numbers = effects, changes, numbers or {}
        self.compared: list[tuple[Switches, Switches]] = []

    def step(self, switches: Switches) -> tuple[float, float]:
        load, compute = 0.5, 0.5
        for switch in switches:
            load, compute = load * self.effects[switch][0], compute * self.effects[switch][1]
        return load, compute

    def diagnose(self, kept: Switches) -> Diagnosis:
        load, compute = self.step(kept)
        first = {s: (load + compute) / (load * e[0] + compute * e[1]) for s, e in self.effects.items() if s not in self.later()}
        tries = tuple(Try((g * 0.9, g * 1.1), "as it is", switch=s) for s, g in first.items())
        cause = Cause(Bottleneck.INPUT_WORKERS, load, 2.0, 0.9, (), tries=tries)
        return Diagnosis(StepBreakdown({"data_wait": load, "forward": compute}, 1, 1), (cause,), False, f"load {load:.2f}")

    def later(self) -> set[str]:
        return {n for names in self.numbers.values() for n in names}

    def compare(self, base: Switches, more: Switches) -> Verdict:
        self.compared.append((base, more))
        speedup = sum(self.step(base)) / sum(self.step((*base, *more)))
        decision = Decision.FASTER if speedup > 1.01 else Decision.SLOWER if speedup < 0.99 else Decision.NO_DIFFERENCE
        numerics = Numerics.CHANGED if set(more) & set(self.changes) else Numerics.CLOSE
        parity = Parity(numerics, True, 30, 0.0, 0.0, "")
        return Verdict(more, decision, "as it is", speedup, (speedup * 0.99, speedup * 1.01), 0.01, parity=parity)

    def refuse(self, switch: str, kept: Switches) -> str:
        return "it needs another machine" if switch == "elsewhere" else ""

    def neighbours(self, switch: str) -> Sequence[str]:
        return self.numbers.get(switch, [])


def run(front: Made, **settings: float | bool):
    return tune(front, Settings(**settings), lambda said: None)


def test_it_keeps_what_helps_and_nothing_else() -> None:
    front = Made({"workers": (0.2, 1.0), "amp": (1.0, 0.5), "pin_memory": (1.0, 1.0), "compile": (1.0, 1.2)})
    found = run(front)
    assert set(found.kept) == {"workers", "amp"}
    assert found.kept[0] == "workers", "the larger promise goes first"
    assert found.total is not None
    assert found.total.speedup == pytest.approx(1 / (0.1 + 0.25))
    assert front.compared[-1] == ((), found.kept), "the bundle is measured against the program as it was"
    assert {u.switch for u in found.untried} >= {"compile"}


def test_a_switch_that_gives_nothing_beside_the_others_goes_again() -> None:
    class Overlapping(Made):
        def step(self, switches: Switches) -> tuple[float, float]:
            load, compute = super().step(switches)
            return (load if not {"fast_decode", "cache"} <= set(switches) else 0.05), compute

        def compare(self, base: Switches, more: Switches) -> Verdict:
            return super().compare(base, more)

    found = run(Overlapping({"fast_decode": (0.5, 1.0), "cache": (0.1, 1.0)}))
    assert found.kept == ("cache",)


def test_numbers_are_searched_until_they_are_past_their_best() -> None:
    front = Made(
        {"workers=2": (0.6, 1.0), "workers=4": (0.3, 1.0), "workers=8": (0.4, 1.0)},
        numbers={"workers=2": ["workers=4", "workers=8", "workers=16"]},
    )
    found = run(front)
    assert found.kept == ("workers=4",)
    assert [e.switch for e in found.ledger if e.kept] == ["workers=4"]
    assert "gives more" in next(e.reason for e in found.ledger if e.switch == "workers=2")


def test_what_changes_the_training_needs_leave() -> None:
    effects = {"batch_size": (0.4, 0.8)}
    assert run(Made(effects, changes=["batch_size"])).kept == ()
    assert run(Made(effects, changes=["batch_size"]), allow_changed=True).kept == ("batch_size",)


def test_what_cannot_be_put_on_and_what_promises_nothing_is_named() -> None:
    found = run(Made({"elsewhere": (0.1, 1.0), "pin_memory": (1.0, 0.93)}))
    reasons = {u.switch: u.reason for u in found.untried}
    assert reasons["elsewhere"] == "it needs another machine"
    assert found.kept == ("pin_memory",)


def test_without_time_nothing_is_tried() -> None:
    front = Made({"workers": (0.2, 1.0)})
    found = run(front, budget_s=-1.0)
    assert (found.kept, front.compared, found.stopped) == ((), [], "the budget is spent")
    assert [u.switch for u in found.untried] == ["workers"]
