"""The Trainer as a user meets it: batches of any shape, errors, interruptions, and phases that add up."""

from __future__ import annotations

import time
import traceback
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

import perftrain.engine.trainer as trainer_module
from perftrain import PerftrainError, Trainer
from perftrain.engine.assemble import assemble
from perftrain.engine.checks import NotAvailable
from perftrain.facts import Card, Numerics, Place, RunRecord
from perftrain.measure.losses import NotFiniteLoss
from perftrain.opt.accumulation import Accumulation
from perftrain.opt.base import Switch
from perftrain.opt.huge_pages import HugePages, why_no_huge_pages
from perftrain.opt.nothing import Nothing
from perftrain.opt.seams import LoaderOptions, OptimizerOptions, Plan, StepFunctions, Workload
from perftrain.opt.workers import Workers


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def data(count: int = 32) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator))


def trainer(*, loader: Any = None, lr: float = 0.1, **options: Any) -> Trainer:
    model = options.pop("model", None) or network()
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=lr)
    loss_fn = None if "step" in options else options.pop("loss_fn", cross_entropy)
    return Trainer(model, loss_fn, optimizer, DataLoader(data(), batch_size=8) if loader is None else loader, **options)


# --- batches ---
@dataclass
class Pair:
    x: Tensor
    y: Tensor


def as_dict(items: list[Any]) -> dict[str, Tensor]:
    return {"x": torch.stack([x for x, _ in items]), "y": torch.stack([y for _, y in items])}


def as_pair(items: list[Any]) -> Pair:
    return Pair(**as_dict(items))


def test_a_pair_and_a_loss_function() -> None:
    fitted = trainer()
    record = fitted.fit(steps=40)
    assert record.status == "complete"
    assert len(fitted.rows) == 40
    assert fitted.rows[-1].loss < fitted.rows[0].loss
    assert all(row.samples == 8 for row in fitted.rows)
    assert record is fitted.record
    assert record.metrics["train_loss"] == fitted.rows[-1].loss


@pytest.mark.parametrize(
    ("collate", "step"),
    [
        (as_dict, lambda model, b: cross_entropy(model(b["x"]), b["y"])),
        (as_pair, lambda model, b: cross_entropy(model(b.x), b.y)),
        (None, lambda model, b: cross_entropy(model(b[0]), b[1])),
    ],
    ids=["dict", "dataclass", "tuple"],
)
def test_any_batch_with_the_users_step(collate: Any, step: Any) -> None:
    plain = trainer()
    plain.fit(steps=6)
    fitted = trainer(loader=DataLoader(data(), batch_size=8, collate_fn=collate), step=step)
    fitted.fit(steps=6)
    assert [r.loss for r in fitted.rows] == [r.loss for r in plain.rows]
    assert [r.samples for r in fitted.rows] == [8] * 6


def test_a_single_tensor_as_batch() -> None:
    fitted = trainer(
        model=nn.Linear(6, 6), loader=DataLoader(torch.randn(32, 6), batch_size=4), step=lambda model, x: mse_loss(model(x), x)
    )
    fitted.fit(steps=5)
    assert [r.samples for r in fitted.rows] == [4] * 5


def test_several_losses_are_all_logged_and_one_is_differentiated() -> None:
    def step(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        loss = cross_entropy(model(batch[0]), batch[1])
        return {"loss": loss, "twice": 2 * loss.detach()}

    fitted = trainer(step=step)
    record = fitted.fit(steps=5)
    losses = fitted.meter.losses()
    assert losses["twice"] == [2 * x for x in losses["loss"]]
    assert record.metrics["train_twice"] == 2 * record.metrics["train_loss"]


# --- what happens once a step ---
@pytest.mark.parametrize("given", [["amp"], "amp", [Nothing], Nothing()], ids=["name", "word", "class", "no list"])
def test_what_is_no_list_of_switches_is_refused(given: Any) -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(PerftrainError, match=r"opt=\[opt.AMP\(\)\]"):
        Trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1), [], opt=given)


def test_the_scheduler_is_stepped_once_an_optimizer_step() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)
    fitted = trainer(model=model, optimizer=optimizer, scheduler=scheduler, opt=[Accumulation()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted.fit(steps=3)
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_gradients_are_clipped() -> None:
    def moved(clip_norm: float | None) -> float:
        model = network()
        before = [p.detach().clone() for p in model.parameters()]
        trainer(model=model, lr=1.0, clip_norm=clip_norm, loss_fn=lambda out, y: 1000 * cross_entropy(out, y)).fit(steps=1)
        return float(torch.cat([(p.detach() - b).flatten() for p, b in zip(model.parameters(), before, strict=True)]).norm())

    assert moved(0.01) == pytest.approx(0.01, rel=1e-3)
    assert moved(None) > 1


# --- evaluation and length ---
def slow_evaluation(model: nn.Module) -> dict[str, float]:
    model.eval()
    time.sleep(0.003)
    return {"accuracy": 0.5}


def test_evaluation_at_the_end_only() -> None:
    fitted = trainer(evaluate=slow_evaluation)
    record = fitted.fit(steps=5)
    assert record.metrics["accuracy"] == 0.5
    assert record.breakdown.share("evaluation") == 0
    assert fitted.model.training


def test_evaluation_every_few_steps_is_a_phase_of_its_own() -> None:
    fitted = trainer(evaluate=slow_evaluation)
    fitted.fit(steps=6, evaluate_every=2)
    evaluated = [row.step for row in fitted.rows if row.phase_s["evaluation"] >= 0.003]
    assert evaluated == [1, 3, 5]
    with pytest.raises(PerftrainError, match="evaluate_every needs evaluate"):
        trainer().fit(steps=2, evaluate_every=1)


def test_epochs_are_passes_over_the_loader() -> None:
    fitted = trainer()
    fitted.fit(epochs=2)
    assert len(fitted.rows) == 2 * len(fitted.workload.loader)


def test_fit_again_goes_on_with_a_new_record() -> None:
    fitted, whole = trainer(), trainer()
    first = fitted.fit(steps=3)
    losses = [r.loss for r in fitted.rows]
    second = fitted.fit(steps=3)
    whole.fit(steps=6)
    assert first is not second
    assert losses + [r.loss for r in fitted.rows] == [r.loss for r in whole.rows]


# --- mistakes ---
@pytest.mark.parametrize("arguments", [{}, {"steps": 3, "epochs": 1}])
def test_either_steps_or_epochs(arguments: dict[str, int]) -> None:
    with pytest.raises(PerftrainError, match="either steps or epochs"):
        trainer().fit(**arguments)


@pytest.mark.parametrize("arguments", [{"steps": 0}, {"steps": -1}, {"epochs": 0}])
def test_at_least_one_step(arguments: dict[str, int]) -> None:
    with pytest.raises(PerftrainError, match="at least one step"):
        trainer().fit(**arguments)


def test_epochs_need_a_length() -> None:
    with pytest.raises(PerftrainError, match="with a length"):
        trainer(loader=(b for b in DataLoader(data(), batch_size=8))).fit(epochs=1)


def test_neither_loss_nor_step() -> None:
    with pytest.raises(PerftrainError, match="loss_fn"):
        trainer(loss_fn=None)


def test_a_generator_that_runs_dry() -> None:
    fitted = trainer(loader=(b for b in DataLoader(data(), batch_size=8)))
    with pytest.raises(PerftrainError, match="exhausted after pass 1"):
        fitted.fit(steps=10)
    assert fitted.record.status == "failed"
    assert len(fitted.rows) == 4


def test_an_empty_loader() -> None:
    with pytest.raises(PerftrainError, match="drop_last"):
        trainer(loader=DataLoader(data(4), batch_size=8, drop_last=True)).fit(steps=1)


def test_no_record_before_fit() -> None:
    with pytest.raises(PerftrainError, match="fit"):
        _ = trainer().record


# --- how it can end ---
def test_nan_stops_and_the_record_says_so() -> None:
    def step(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1]) * (float("nan") if len(seen) >= 5 else 1.0)

    seen: list[int] = []
    fitted = trainer(step=step)
    with pytest.raises(NotFiniteLoss, match="at step 5"):
        fitted.fit(steps=1000, on_step=seen.append)
    assert fitted.record.status == "failed"
    assert "NotFiniteLoss" in fitted.record.reason
    assert len(seen) <= 64


def test_nan_in_a_short_run_is_seen_at_its_end() -> None:
    fitted = trainer(loss_fn=lambda out, y: cross_entropy(out, y) * float("nan"))
    with pytest.raises(NotFiniteLoss, match="at step 0"):
        fitted.fit(steps=3)
    assert fitted.record.status == "failed"


def test_nan_may_be_allowed() -> None:
    record = trainer(loss_fn=lambda out, y: cross_entropy(out, y) * float("nan"), stop_on_nan=False).fit(steps=3)
    assert record.status == "complete"


def test_an_interrupted_run_keeps_what_was_measured() -> None:
    def interrupt(step: int) -> None:
        if step == 7:
            raise KeyboardInterrupt

    fitted = trainer()
    with pytest.raises(KeyboardInterrupt):
        fitted.fit(steps=100, on_step=interrupt)
    assert fitted.record.status == "interrupted"
    assert len(fitted.rows) == 7
    assert fitted.record.breakdown.steps > 0


class TheirOwn(Exception):
    pass


def faulty_loss(output: Tensor, target: Tensor) -> Tensor:
    raise TheirOwn("in my loss")


def test_the_users_exception_comes_out_unchanged() -> None:
    fitted = trainer(loss_fn=faulty_loss)
    with pytest.raises(TheirOwn, match=r"^in my loss$") as caught:
        fitted.fit(steps=3)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "faulty_loss"
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    assert fitted.record.status == "failed"
    assert "in my loss" in fitted.record.reason


# --- switches of the test's own ---
def card(name: str, place: Place = Place.EDIT, **rest: Any) -> Card:
    return Card(name=name, summary="", place=place, numerics=Numerics.EXACT, **rest)


@dataclass(frozen=True)
class Foe(Switch):
    card: ClassVar[Card] = card("foe", conflicts=("nothing",))


@dataclass(frozen=True)
class Missing(Switch):
    card: ClassVar[Card] = card("missing")

    def unavailable(self, plan: Plan) -> str:
        return f"no such thing on {plan.device}."


class Shell(nn.Module):
    """A wrapper whose parameters are new objects."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        for layer in module.modules():
            for name, parameter in list(layer.named_parameters(recurse=False)):
                setattr(layer, name, nn.Parameter(parameter.detach().clone()))

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


@dataclass(frozen=True)
class Wrap(Switch):
    card: ClassVar[Card] = card("wrap", Place.DATA_PARALLEL)

    def model(self, model: nn.Module, plan: Plan) -> nn.Module:
        return Shell(model)


@pytest.mark.parametrize("switches", [[Foe(), Nothing()], [Nothing(), Foe()]])
def test_conflicting_switches_are_refused(switches: list[Switch]) -> None:
    with pytest.raises(PerftrainError, match="'foe' and 'nothing' exclude each other"):
        trainer(opt=switches)


def test_a_switch_twice_is_refused() -> None:
    with pytest.raises(PerftrainError, match="'nothing' is given 2 times"):
        trainer(opt=[Nothing(), Nothing()])


def test_a_switch_that_cannot_run_is_refused() -> None:
    with pytest.raises(NotAvailable, match="missing cannot run here: no such thing on cpu"):
        trainer(opt=[Missing()])


def test_variables_that_come_too_late_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    with pytest.raises(PerftrainError, match=r"GLIBC_TUNABLES=glibc\.malloc\.hugetlb=1 python "):
        trainer(opt=[HugePages()])
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    if not why_no_huge_pages():
        trainer(opt=[HugePages()])


def test_workers_need_a_dataloader() -> None:
    with pytest.raises(PerftrainError, match="'workers' changes the arguments of a"):
        trainer(loader=[(torch.ones(2, 6), torch.zeros(2, dtype=torch.long))], opt=[Workers(1)])


# --- the optimizer on replaced parameters ---
def test_the_optimizer_is_rebuilt_on_replaced_parameters() -> None:
    model = network()
    groups = [{"params": [model[0].weight], "lr": 0.5, "weight_decay": 0.1}, {"params": [model[0].bias, *model[2].parameters()]}]
    optimizer = torch.optim.SGD(groups, lr=0.25, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0), torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)],
        milestones=[1],
    )
    fitted = trainer(model=model, optimizer=optimizer, scheduler=scheduler, opt=[Wrap()])
    assert fitted.optimizer is not optimizer
    shell = fitted.model
    assert [[id(p) for p in g["params"]] for g in fitted.optimizer.param_groups] == [
        [id(shell.module[0].weight)],
        [id(shell.module[0].bias), id(shell.module[2].weight), id(shell.module[2].bias)],
    ]
    assert [(g["lr"], g["weight_decay"], g["momentum"]) for g in fitted.optimizer.param_groups] == [
        (0.5, 0.1, 0.9),
        (0.25, 0, 0.9),
    ]
    fitted.fit(steps=3)
    assert [g["lr"] for g in fitted.optimizer.param_groups] == [0.125, 0.0625]


def test_wrapping_changes_no_loss() -> None:
    plain, wrapped = trainer(), trainer(opt=[Wrap()])
    plain.fit(steps=8)
    wrapped.fit(steps=8)
    assert [r.loss for r in plain.rows] == [r.loss for r in wrapped.rows]


def test_nothing_changes_means_the_very_same_objects() -> None:
    fitted = trainer()
    assert fitted.optimizer is fitted.workload.optimizer
    assert fitted.model is fitted.workload.model


# --- loaders read back ---
class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.full((6,), float(n)), torch.tensor(n % 3)) for n in range(16)])


def samples_of(loader: Any) -> list[list[float]]:
    torch.manual_seed(3)
    return [batch[0][:, 0].tolist() for batch in loader]


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(data(), batch_size=8, shuffle=True),
        lambda: DataLoader(data(), batch_size=5, drop_last=True),
        lambda: DataLoader(data(), batch_size=8, sampler=RandomSampler(data(), generator=torch.Generator().manual_seed(9))),
        lambda: DataLoader(data(), batch_size=8, sampler=RandomSampler(data(), num_samples=20)),
        lambda: DataLoader(data(), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(9)),
        lambda: DataLoader(data(), batch_sampler=[[3, 1], [2, 0]]),
        lambda: DataLoader(Stream(), batch_size=4),
    ],
    ids=["shuffled", "in order", "own generator", "fewer", "loader's generator", "batch sampler", "iterable"],
)
def test_a_rebuilt_loader_gives_the_same_samples(make: Any) -> None:
    assert samples_of(LoaderOptions.of(make()).build()) == samples_of(make())


# --- phases add up ---
@pytest.mark.parametrize("case", ["plain", "evaluate_every", "workers", "micro_batches"])
def test_phases_add_up_to_the_wall_time(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outside: list[float] = []

    def timed(*arguments: Any) -> None:
        begin = time.perf_counter()
        inner(*arguments)
        outside.append(time.perf_counter() - begin)

    inner = trainer_module.train
    monkeypatch.setattr(trainer_module, "train", timed)
    switches = {"workers": [Workers(1)], "micro_batches": [Accumulation()]}.get(case, [])
    fitted = trainer(opt=switches, evaluate=slow_evaluation)
    fitted.fit(steps=40, evaluate_every=5 if case == "evaluate_every" else None)
    assert sum(row.step_s for row in fitted.rows) == pytest.approx(outside[0], rel=0.01)
    assert {row.samples for row in fitted.rows} == {8}


# --- order ---
def recording(place: Place, calls: list[tuple[str, Place]]) -> Switch:
    """A stand-in that notes the calls of its hooks."""

    @dataclass(frozen=True)
    class Recorder(Switch):
        card: ClassVar[Card] = card(f"at_{place.name.lower()}", place)

        def plan(self, plan: Plan) -> Plan:
            calls.append(("plan", place))
            return plan

        def process(self) -> Any:
            calls.append(("process", place))
            return super().process()

        def loader(self, options: LoaderOptions) -> Any:
            calls.append(("loader", place))
            return options

        def model(self, model: nn.Module, plan: Plan) -> nn.Module:
            calls.append(("model", place))
            return model

        def optimizer(self, options: OptimizerOptions) -> OptimizerOptions:
            calls.append(("optimizer", place))
            return options

        def step(self, functions: StepFunctions) -> StepFunctions:
            calls.append(("step", place))

            def forward(batch: Any) -> Any:
                calls.append(("forward", place))
                return functions.forward(batch)

            return functions.with_(forward=forward)

    return Recorder()


@pytest.mark.parametrize(
    "given", [list(Place), list(reversed(Place)), sorted(Place, key=lambda p: p * 7 % 11)], ids=["sorted", "reversed", "mixed"]
)
def test_hooks_are_called_in_the_order_of_places(given: list[Place]) -> None:
    calls: list[tuple[str, Place]] = []
    fitted = trainer(opt=[recording(place, calls) for place in given])
    by_hook = {hook: [p for h, p in calls if h == hook] for hook in ("plan", "process", "loader", "model", "optimizer", "step")}
    assert by_hook == {hook: list(Place) for hook in by_hook}
    order = list(dict.fromkeys(hook for hook, _ in calls))
    assert order == ["process", "plan", "loader", "model", "optimizer", "step"]
    calls.clear()
    fitted.fit(steps=1)
    assert [p for h, p in calls if h == "forward"] == list(reversed(Place))  # the last place is the outermost


def test_a_record_is_whole() -> None:
    record = trainer(opt=[Nothing()]).fit(steps=5)
    assert isinstance(record, RunRecord)
    assert record.settings == {"nothing": {}}
    assert record.seconds > 0
    assert record.breakdown.steps + 1 <= 5


def test_assemble_alone() -> None:
    model = network()
    work = Workload(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data(), batch_size=8), cross_entropy)
    run = assemble(work, [], torch.device("cpu"))
    assert run.functions.model is model
    assert run.functions.samples_in(next(run.batches)) == 8
