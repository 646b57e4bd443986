"""Switches about the optimizer: what reaches torch, that the training stays what it was, and what they refuse."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from perftrain import PerftrainError, Trainer, opt
from perftrain.engine.trainer import facts_of
from perftrain.opt.base import Switch
from perftrain.opt.seams import OptimizerOptions, Plan
from tests.opt.dispatched import Dispatched

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}
GPU = Plan(device=torch.device("cuda"))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def trainer(*switches: Switch, make: Make = OPTIMIZERS["SGD"], schedule: Any = None, **rest: Any) -> Trainer:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(96, 16, generator=generator), torch.randint(0, 4, (96,), generator=generator))
    model = rest.pop("model", None) or network()
    optimizer = make(model.parameters())
    loader = DataLoader(data, batch_size=16)
    return Trainer(model, cross_entropy, optimizer, loader, opt=switches, scheduler=schedule and schedule(optimizer), **rest)


def losses(*switches: Switch, steps: int = 20, **rest: Any) -> list[float]:
    made = trainer(*switches, **rest)
    made.fit(steps=steps)
    return made.meter.losses()["loss"]


def one_cycle(optimizer: torch.optim.Optimizer) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=30)


class Stranger(torch.optim.Optimizer):
    """Somebody's own: no fused, no foreach."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])


# --- fused, foreach ---
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("switch", "argument"), [(opt.Fused(), "fused"), (opt.Foreach(), "foreach")])
def test_the_implementation_is_the_one_asked_for(name: str, switch: Switch, argument: str) -> None:
    made = trainer(switch, make=OPTIMIZERS[name])
    assert type(made.optimizer) is type(made.workload.optimizer)
    assert [g[argument] for g in made.optimizer.param_groups] == [True]
    assert made.optimizer.param_groups[0]["lr"] == made.workload.optimizer.param_groups[0]["lr"]
    with torch.profiler.profile() as seen:
        made.fit(steps=1)
    called = {event.key for event in seen.key_averages()}
    assert any(f"_{argument}_" in key for key in called), called


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("switch", [opt.Fused(), opt.Foreach()])
def test_another_implementation_is_the_same_training(name: str, switch: Switch) -> None:
    assert losses(switch, make=OPTIMIZERS[name]) == pytest.approx(losses(make=OPTIMIZERS[name]), rel=1e-4)


def test_foreach_can_be_taken_back() -> None:
    options = OptimizerOptions(torch.optim.SGD, ({"params": (), "foreach": None},))
    assert opt.Foreach(enabled=False).optimizer(options).arguments == {"foreach": False, "fused": False}
    assert not opt.Foreach(enabled=False).unavailable(GPU)
    assert "by themselves" in opt.Foreach().unavailable(GPU)
    assert "by themselves" in opt.Foreach(enabled=False).unavailable(Plan())


@pytest.mark.parametrize("switch", [opt.Fused(), opt.Foreach()])
def test_an_optimizer_without_it_is_refused(switch: Switch) -> None:
    assert switch.unfit(facts_of(trainer(make=Stranger).workload))
    with pytest.raises(PerftrainError, match="Stranger"):
        trainer(switch, make=Stranger)


@pytest.mark.parametrize(("switch", "argument"), [(opt.Fused(), "fused"), (opt.Foreach(), "foreach")])
def test_what_is_on_already_is_said(switch: Switch, argument: str) -> None:
    with pytest.raises(PerftrainError, match="already"):
        trainer(switch, make=lambda p: torch.optim.SGD(p, lr=0.1, **{argument: True}))


def test_fused_takes_the_place_of_the_programs_own_foreach() -> None:
    made = trainer(opt.Fused(), make=lambda p: torch.optim.Adam(p, lr=0.01, foreach=True))
    made.fit(steps=2)
    assert made.optimizer.param_groups[0]["fused"]


def test_fused_with_loss_scaling() -> None:
    assert losses(opt.Fused(), opt.AMP(dtype="float16"), make=OPTIMIZERS["Adam"]) == pytest.approx(
        losses(make=OPTIMIZERS["Adam"]), rel=0.02
    )


@pytest.mark.parametrize("schedule", [lambda o: LambdaLR(o, lambda step: 0.9**step), one_cycle])
def test_a_schedule_acts_on_the_rebuilt_optimizer(schedule: Any) -> None:
    plain = trainer(schedule=schedule, make=OPTIMIZERS["momentum"])
    other = trainer(opt.Fused(), schedule=schedule, make=OPTIMIZERS["momentum"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where it thinks that the order of step and schedule is wrong
        plain.fit(steps=20)
        other.fit(steps=20)
    assert other.optimizer.param_groups[0]["lr"] == plain.optimizer.param_groups[0]["lr"]
    assert other.meter.losses()["loss"] == pytest.approx(plain.meter.losses()["loss"], rel=1e-4)


# --- optimizer in backward ---
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("schedule", [None, one_cycle])
def test_in_backward_the_losses_are_the_same_bit_for_bit(name: str, schedule: Any) -> None:
    if name == "Adagrad" and schedule:
        pytest.skip("OneCycleLR needs a momentum to cycle")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        here = losses(opt.OptimizerInBackward(), make=OPTIMIZERS[name], schedule=schedule)
    assert here == losses(make=OPTIMIZERS[name], schedule=schedule)


def test_in_backward_weights_and_state_are_the_same_bit_for_bit() -> None:
    plain, other = trainer(make=OPTIMIZERS["Adam"]), trainer(opt.OptimizerInBackward(), make=OPTIMIZERS["Adam"])
    plain.fit(steps=5)
    other.fit(steps=5)
    assert all(torch.equal(a, b) for a, b in zip(plain.model.parameters(), other.model.parameters(), strict=True))
    here, there = other.optimizer.state_dict(), plain.optimizer.state_dict()
    assert here["param_groups"] == there["param_groups"]
    assert set(here["state"]) == set(there["state"])
    assert all(torch.equal(here["state"][n][k], v) for n, state in there["state"].items() for k, v in state.items())


def test_in_backward_never_are_all_gradients_there() -> None:
    def most_at_once(*switches: Switch) -> int:
        model = nn.Sequential(nn.Linear(16, 256), *(nn.Linear(256, 256) for _ in range(6)), nn.Linear(256, 4))
        made = trainer(*switches, model=model, make=lambda p: torch.optim.SGD(p, lr=1e-3))
        made.fit(steps=1)
        with Dispatched() as seen:
            made.fit(steps=1)
        return seen.peak

    gradients = 4 * 6 * 256 * 256
    assert most_at_once() >= gradients
    assert most_at_once(opt.OptimizerInBackward()) < gradients / 2


def test_in_backward_with_fused_and_amp() -> None:
    switches = (opt.Fused(), opt.AMP())
    assert losses(opt.OptimizerInBackward(), *switches, make=OPTIMIZERS["Adam"]) == losses(*switches, make=OPTIMIZERS["Adam"])


def test_in_backward_tied_weights_move_once() -> None:
    def tied() -> nn.Module:
        model = network()
        model[2].weight = model[2].weight
        return nn.Sequential(model[0], model[1], model[2], nn.Tanh(), model[2], nn.Tanh(), model[4])

    assert losses(opt.OptimizerInBackward(), model=tied()) == losses(model=tied())


def test_in_backward_refuses_what_needs_all_gradients() -> None:
    with pytest.raises(PerftrainError, match="clips them"):
        trainer(opt.OptimizerInBackward(), clip_norm=1.0)
    assert opt.OptimizerInBackward().unfit(facts_of(trainer(clip_norm=1.0).workload))
    assert not opt.OptimizerInBackward().unfit(facts_of(trainer().workload))
    with pytest.raises(PerftrainError, match="float16"):
        trainer(opt.OptimizerInBackward(), opt.AMP(dtype="float16"))
    with pytest.raises(PerftrainError, match="exclude each other"):
        trainer(opt.OptimizerInBackward(), opt.Accumulation())


# --- moments in few bits ---
def test_low_memory_needs_adam_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert opt.LowMemoryOptimizer().unfit(facts_of(trainer().workload))
    with pytest.raises(PerftrainError, match=r"replaces torch\.optim\.Adam or AdamW; this program uses SGD"):
        opt.LowMemoryOptimizer().optimizer(OptimizerOptions(torch.optim.SGD, ()))
    with pytest.raises(PerftrainError, match=r"Try opt\.low_memory_optimizer\.states=int8"):
        opt.LowMemoryOptimizer(states="int2")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install torchao" in opt.LowMemoryOptimizer().unavailable(Plan())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_low_memory_states_are_small_and_train_alike(name: str) -> None:
    pytest.importorskip("torchao")

    def schedule(optimizer: torch.optim.Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: 1 / (1 + step))

    made = trainer(opt.LowMemoryOptimizer(), make=OPTIMIZERS[name], schedule=schedule)
    made.fit(steps=10)
    assert type(made.optimizer).__name__ == f"{name}8bit"
    moment = made.optimizer.state[made.model[2].weight]["exp_avg"]
    assert moment.codes.dtype == torch.uint8
    assert float(made.optimizer.param_groups[0]["lr"]) == pytest.approx(0.01 / 11)
    assert made.meter.losses()["loss"] == pytest.approx(losses(make=OPTIMIZERS[name], schedule=schedule, steps=10), rel=0.02)
    assert list(opt.LowMemoryOptimizer().report(made.model)) == ["moments of 74% of the parameters are in int8"]


# --- clipping ---
def clipped(*switches: Switch, **rest: Any) -> tuple[list[float], list[Tensor]]:
    made = trainer(*switches, clip_norm=0.05, **rest)
    made.fit(steps=20)
    return made.meter.losses()["loss"], [p.detach() for p in made.model.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("others", [(), (opt.Fused(),), (opt.AMP(dtype="float16"),)], ids=["alone", "fused", "scaled"])
def test_fused_clip_clips_as_before(name: str, others: tuple[Switch, ...]) -> None:
    make = OPTIMIZERS[name]
    (here, weights), (there, expected) = clipped(opt.FusedClip(), *others, make=make), clipped(*others, make=make)
    assert here == pytest.approx(there, rel=1e-4)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(weights, expected, strict=True))
    if name == "SGD":
        assert here != pytest.approx(losses(*others), rel=1e-4)  # it does clip


def test_fused_clip_leaves_the_scaling_to_the_optimizer() -> None:
    def operators(*switches: Switch) -> set[str]:
        made = trainer(*switches, clip_norm=0.05)
        made.fit(steps=1)
        with Dispatched() as seen:
            made.fit(steps=1)
        return set(seen.operators)

    outside, inside = operators(opt.Fused()), operators(opt.FusedClip())
    assert {"_fused_sgd_", "_foreach_norm", "_foreach_mul_"} <= outside
    assert {"_fused_sgd_", "_foreach_norm"} <= inside
    assert "_foreach_mul_" not in inside


def test_fused_clip_has_its_conditions() -> None:
    assert opt.FusedClip().unfit(facts_of(trainer().workload))
    assert not opt.FusedClip().unfit(facts_of(trainer(clip_norm=1.0).workload))
    assert opt.FusedClip().unfit(facts_of(trainer(clip_norm=1.0, make=Stranger).workload))
    with pytest.raises(PerftrainError, match="no clip_norm"):
        trainer(opt.FusedClip())
    with pytest.raises(PerftrainError, match="Stranger"):
        trainer(opt.FusedClip(), clip_norm=1.0, make=Stranger)
