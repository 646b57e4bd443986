"""Switches about the step: micro-batches, averaged weights, recorded steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from perftrain import PerftrainError, Trainer, opt
from perftrain.engine.trainer import facts_of
from perftrain.opt.accumulation import split_batch
from perftrain.opt.base import Switch
from perftrain.opt.seams import Plan

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def data(count: int = 44) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator))


def trainer(*switches: Switch, batch_size: int = 16, count: int = 44, **rest: Any) -> Trainer:
    model = rest.pop("model", None) or network()
    make = rest.pop("make", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    loss_fn = None if "step" in rest else rest.pop("loss_fn", cross_entropy)
    loader = rest.pop("loader", None) or DataLoader(data(count), batch_size=batch_size)
    return Trainer(model, loss_fn, make(model.parameters()), loader, opt=switches, **rest)


def fitted(*switches: Switch, steps: int = 12, **rest: Any) -> Trainer:
    made = trainer(*switches, **rest)
    torch.manual_seed(5)
    made.fit(steps=steps)
    return made


def losses(*switches: Switch, **rest: Any) -> list[float]:
    return fitted(*switches, **rest).meter.losses()["loss"]


# --- accumulation ---
@pytest.mark.parametrize("micro_batches", [2, 3, 4])
def test_micro_batches_train_as_the_batch_does(micro_batches: int) -> None:
    """16, 16 and 12 samples: unequal parts of unequal batches, whose last is smaller."""
    plain, other = fitted(), fitted(opt.Accumulation(micro_batches=micro_batches))
    assert [row.samples for row in other.rows] == [16, 16, 12] * 4
    assert other.meter.losses()["loss"] == pytest.approx(plain.meter.losses()["loss"], rel=1e-5)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(plain.model.parameters(), other.model.parameters(), strict=True))


def test_the_gradient_is_the_batchs() -> None:
    def gradient(*switches: Switch) -> list[Tensor]:
        seen: list[Tensor] = []

        class Look(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                seen.extend(p.grad.clone() for group in self.param_groups for p in group["params"])
                return super().step(closure)

        made = trainer(*switches, make=lambda p: Look(p, lr=0.1), count=10, batch_size=10)
        made.fit(steps=1)
        return seen

    whole, parts = gradient(), gradient(opt.Accumulation(micro_batches=4))
    assert len(whole) == 4
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(whole, parts, strict=True))


def test_activations_shrink_to_one_parts() -> None:
    def most_at_once(*switches: Switch) -> int:
        alive, most = 0, 0

        class Kept:
            def __init__(self, tensor: Tensor) -> None:
                nonlocal alive, most
                self.tensor, self.size = tensor, tensor.numel() * tensor.element_size() if tensor.grad_fn is not None else 0
                alive += self.size
                most = max(most, alive)

            def __del__(self) -> None:
                nonlocal alive
                alive -= self.size

        made = trainer(*switches, count=64, batch_size=64)
        with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
            made.fit(steps=2)
        return most

    assert most_at_once(opt.Accumulation(micro_batches=4)) <= most_at_once() / 3


@pytest.mark.parametrize(("dtype", "rel"), [("bfloat16", 0.02), ("float16", 0.01)])
def test_micro_batches_in_16_bits(dtype: str, rel: float) -> None:
    switches = [opt.AMP(dtype=dtype), opt.Accumulation(micro_batches=4)]
    assert losses(*switches) == pytest.approx(losses(), rel=rel)
    assert losses(*switches, clip_norm=0.1) == pytest.approx(losses(clip_norm=0.1), rel=rel)


def test_all_losses_are_means_over_the_parts() -> None:
    def step(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        out = model(x)
        return {"loss": cross_entropy(out, y), "accuracy": (out.argmax(1) == y).float().mean()}

    plain, other = fitted(step=step).meter.losses(), fitted(opt.Accumulation(), step=step).meter.losses()
    assert other["accuracy"] == pytest.approx(plain["accuracy"])
    assert other["loss"] == pytest.approx(plain["loss"], rel=1e-5)


def test_parts_count_by_what_the_workload_counts() -> None:
    """A mean over tokens that are no padding: parts with more of them weigh more."""
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(8, 5, 6, generator=generator), torch.randint(0, 3, (8, 5), generator=generator)
    for row in range(8):
        y[row, 1 + row % 5 :] = -100
    from perftrain.engine.assemble import assemble
    from perftrain.engine.loop import train
    from perftrain.measure.meter import Meter
    from perftrain.opt.seams import Workload

    def trained(*switches: Switch) -> tuple[list[float], list[Tensor]]:
        model = network()
        work = Workload(
            model,
            torch.optim.SGD(model.parameters(), lr=0.5),
            DataLoader(TensorDataset(x, y), batch_size=8),
            loss_fn=lambda output, target: cross_entropy(output.flatten(0, 1), target.flatten()),
            samples_in=lambda batch: int((batch[1] != -100).sum()),
        )
        run, meter = assemble(work, switches, torch.device("cpu")), Meter()
        meter.start()
        train(run, 3, meter)
        assert meter.rows()[0].samples == int((y != -100).sum())
        return meter.losses()["loss"], list(model.parameters())

    (here, weights), (there, expected) = trained(opt.Accumulation(micro_batches=4)), trained()
    assert here == pytest.approx(there, rel=1e-5)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(weights, expected, strict=True))


@dataclass
class Pair:
    x: Tensor
    y: Tensor
    temperature: float = 1.0


@pytest.mark.parametrize("batch", [(torch.arange(7), torch.arange(14).view(7, 2)), {"x": torch.arange(7), "n": 3}, [torch.arange(7)]])
def test_the_parts_together_are_the_batch(batch: Any) -> None:
    parts = list(split_batch(batch, 3))
    first = [part["x"] if isinstance(part, dict) else part[0] for part in parts]
    assert [len(x) for x in first] == [2, 2, 3]
    assert torch.equal(torch.cat(first), torch.arange(7))
    assert all(type(part) is type(batch) for part in parts)


def test_dataclasses_are_split() -> None:
    parts = list(split_batch(Pair(torch.arange(4), torch.arange(4)), 2))
    assert parts[1].y.tolist() == [2, 3]
    assert parts[1].temperature == 1.0


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ((torch.zeros(4), torch.zeros(3)), r"sizes are \[3, 4\]"),
        ((torch.tensor(1.0),), r"sizes are \[\]"),
        ((torch.zeros(3), torch.zeros(3)), "one has 3 for 4"),
        ((torch.zeros(4), {1, 2}), "holds a set"),
    ],
)
def test_what_cannot_be_split_is_refused(batch: Any, says: str) -> None:
    with pytest.raises(PerftrainError, match=says):
        list(split_batch(batch, 4))


def test_accumulation_refuses_what_makes_no_sense() -> None:
    with pytest.raises(PerftrainError, match=r"Try opt\.accumulation\.micro_batches=2"):
        opt.Accumulation(micro_batches=1)
    assert "fewer than" in opt.Accumulation(micro_batches=32).unfit(facts_of(trainer().workload))
    with pytest.raises(PerftrainError, match="at least one sample for each micro-batch"):
        fitted(opt.Accumulation(micro_batches=32))
    assert not opt.Accumulation().unfit(facts_of(trainer().workload))


def test_batch_normalization_is_noted() -> None:
    assert list(opt.Accumulation().report(network())) == []
    (line,) = opt.Accumulation().report(nn.Sequential(nn.BatchNorm1d(3)))
    assert "1/2 of a batch" in line


def test_an_epoch_has_as_many_steps_as_before() -> None:
    made = trainer(opt.Accumulation())
    made.fit(epochs=2)
    assert len(made.rows) == 6


# --- averaged weights ---
def test_the_average_is_what_is_evaluated() -> None:
    """Against the definition, written out."""
    decay, model = 0.9, network()
    evaluated: list[list[Tensor]] = []
    expected: list[Tensor] = []

    def follow(step: int) -> None:
        now = [p.detach().clone() for p in model.parameters()]
        if not expected:
            expected.extend(now)
        else:
            expected[:] = [e * decay + n * (1 - decay) for e, n in zip(expected, now, strict=True)]

    def evaluate(seen: nn.Module) -> dict[str, float]:
        evaluated.append([p.detach().clone() for p in seen.parameters()])
        return {"x": 0.0}

    trainer(opt.EMA(decay=decay), model=model, evaluate=evaluate).fit(steps=10, on_step=follow)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(evaluated[-1], expected, strict=True))
    assert not all(torch.allclose(a, b, atol=1e-3) for a, b in zip(evaluated[-1], model.parameters(), strict=True))


@pytest.mark.parametrize("others", [(), (opt.AMP(dtype="float16"),), (opt.OptimizerInBackward(),), (opt.Accumulation(),)])
def test_training_does_not_notice_the_average(others: tuple[Switch, ...]) -> None:
    plain, other = fitted(*others), fitted(opt.EMA(decay=0.5), *others)
    assert other.meter.losses() == plain.meter.losses()
    averaged = other.run.functions.evaluated
    assert averaged is not None
    moved = [not torch.equal(a, b) for a, b in zip(averaged.parameters(), network().parameters(), strict=True)]
    assert all(moved)
    assert trainer().run.functions.evaluated is None


def test_the_average_follows_every_few_steps_and_keeps_buffers() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    made = trainer(opt.EMA(every=4), model=model)
    made.fit(steps=3)
    averaged = made.run.functions.evaluated
    assert averaged is not None
    assert not torch.equal(averaged[1].running_mean, model[1].running_mean)
    made.fit(steps=1)
    assert torch.equal(averaged[1].running_mean, model[1].running_mean)
    assert torch.equal(averaged[0].weight, model[0].weight)  # the first average is the model


@pytest.mark.parametrize(("fields", "says"), [({"decay": 1.0}, r"Try opt\.ema\.decay"), ({"every": 0}, r"Try opt\.ema\.every")])
def test_ema_refuses(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(PerftrainError, match=says):
        opt.EMA(**fields)


# --- recorded steps ---
def test_cuda_graph_needs_cuda() -> None:
    assert "on CUDA devices only" in opt.CudaGraph().unavailable(Plan())
    with pytest.raises(PerftrainError, match="on CUDA devices only"):
        trainer(opt.CudaGraph())
    with pytest.raises(PerftrainError, match="exclude each other"):
        trainer(opt.CudaGraph(), opt.Accumulation())
    assert "float16" in opt.CudaGraph().unavailable(Plan(torch.device("cuda"), torch.float16))
    assert opt.CudaGraph().unfit(facts_of(trainer(make=torch.optim.Rprop).workload))
    with pytest.raises(PerftrainError, match=r"Try opt\.cuda_graph\.warmup_steps=3"):
        opt.CudaGraph(warmup_steps=0)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
@pytest.mark.parametrize("amp", [False, True])
def test_a_recorded_step_trains_as_an_ordinary_one(name: str, amp: bool) -> None:
    def trained(*switches: Switch) -> list[float]:
        def make(parameters: Any) -> torch.optim.Optimizer:
            return getattr(torch.optim, name)(parameters, lr=0.01)

        from torch.optim.lr_scheduler import LambdaLR

        model = network().cuda()
        optimizer = make(model.parameters())
        loader = DataLoader(data(48), batch_size=16)
        every = (*switches, opt.AMP()) if amp else switches
        schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        made = Trainer(model, cross_entropy, optimizer, loader, opt=every, scheduler=schedule, clip_norm=0.1)
        made.fit(steps=20)
        return made.meter.losses()["loss"]

    assert trained(opt.CudaGraph()) == pytest.approx(trained(), rel=1e-2 if amp else 1e-4)


@pytest.mark.gpu
@needs_gpu
def test_another_shape_is_refused() -> None:
    with pytest.raises(PerftrainError, match="replays one recorded shape"):
        fitted(opt.CudaGraph(warmup_steps=1), device="cuda")


def test_a_sum_is_not_a_mean() -> None:
    """What the docstring warns of shows in the losses, so that parity finds it."""

    def total(output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(output.sum(1), target.float(), reduction="sum")

    plain, other = losses(loss_fn=total, steps=1), losses(opt.Accumulation(), loss_fn=total, steps=1)
    assert other[0] == pytest.approx(plain[0] / 2, rel=0.5)
    assert other[0] < 0.9 * plain[0]
