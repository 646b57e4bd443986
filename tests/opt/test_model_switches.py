"""Switches about the model: what is compiled, what is computed twice, what multiplies in 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

from perftrain import PerftrainError, Trainer, opt
from perftrain.engine.trainer import facts_of
from perftrain.opt.base import Switch
from perftrain.opt.seams import Plan, repeated_blocks
from tests.opt.dispatched import Dispatched


class Attention(nn.Module):
    """One transformer layer with dropout."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.LayerNorm(width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + self.drop(torch.nn.functional.gelu(self.out(scaled_dot_product_attention(q, k, v))))


class Residual(nn.Module):
    """As in a ResNet: convolution and batch normalization."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


class Net(nn.Module):
    def __init__(self, blocks: list[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks), head

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(1))


def transformer(depth: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return Net([Attention() for _ in range(depth)], nn.Linear(8 * 16, 4))


def resnet(depth: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return Net([Residual() for _ in range(depth)], nn.Linear(8 * 36, 4))


def plain_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(8 * 16, 8), nn.ReLU(), nn.Linear(8, 4))


SHAPES = {transformer: (8, 16), resnet: (8, 6, 6), plain_net: (8, 16)}
Make = Callable[[], nn.Module]


def trainer(*switches: Switch, make: Make = transformer, count: int = 32, **rest: Any) -> Trainer:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(count, *SHAPES[make], generator=generator), torch.randint(0, 4, (count,), generator=generator)
    model = make()
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    return Trainer(model, cross_entropy, torch.optim.SGD(model.parameters(), lr=0.05), loader, opt=switches, **rest)


def fitted(*switches: Switch, steps: int = 8, **rest: Any) -> Trainer:
    made = trainer(*switches, **rest)
    torch.manual_seed(5)
    made.fit(steps=steps)
    return made


def same_state(here: nn.Module, there: nn.Module) -> bool:
    ours, theirs = here.state_dict(), there.state_dict()
    return list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


# --- checkpointing ---
def kept_bytes(model: nn.Module, x: Tensor) -> int:
    """What one forward pass leaves alive for the backward pass, whoever keeps it."""
    with Dispatched() as seen:
        out = model(x)
    assert out.requires_grad
    return seen.now


@pytest.mark.parametrize("make", [transformer, resnet])
@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("every", [1, 2])
def test_checkpointed_training_is_the_same_bit_for_bit(make: Make, mode: str, every: int) -> None:
    """Dropout, batch normalization with its statistics, and the names of everything."""
    plain, other = fitted(make=make), fitted(opt.Checkpointing(mode=mode, every=every), make=make)
    assert other.meter.losses() == plain.meter.losses()
    assert same_state(other.model, plain.model)
    assert [name for name, _ in other.model.named_parameters()] == [name for name, _ in plain.model.named_parameters()]
    assert sum(type(block).__name__.startswith("Checkpointed") for block in other.model.blocks) == len(plain.model.blocks) // every
    assert all(isinstance(block, (Attention, Residual)) for block in other.model.blocks)


@pytest.mark.parametrize("make", [transformer, resnet])
def test_checkpointing_keeps_less(make: Make) -> None:
    x = torch.randn(64, *SHAPES[make])
    kept = {}
    for name, switch in {"off": opt.Nothing(), "selective": opt.Checkpointing(mode="selective"), "half": opt.Checkpointing(every=2),
                         "full": opt.Checkpointing()}.items():  # fmt: skip
        kept[name] = kept_bytes(trainer(switch, make=make).model, x)
    assert kept["full"] < kept["selective"] < kept["off"]
    assert kept["full"] < kept["half"] < kept["off"]
    assert kept["full"] < kept["off"] / 2


def operators(*switches: Switch) -> dict[str, int]:
    """How often each was really called in one step."""
    made = fitted(*switches)
    with Dispatched() as seen:
        made.fit(steps=1)
    return seen.operators


def test_everything_is_computed_twice_or_only_what_is_cheap() -> None:
    plain, full, selective = operators(), operators(opt.Checkpointing()), operators(opt.Checkpointing(mode="selective"))
    assert plain["gelu"] == 4
    assert full["gelu"] == selective["gelu"] == 8
    assert full["addmm"] > plain["addmm"]
    assert selective["addmm"] == plain["addmm"]


def test_evaluation_computes_once() -> None:
    made = fitted(opt.Checkpointing())
    with torch.no_grad(), Dispatched() as seen:
        made.model(torch.randn(2, 8, 16))
    assert seen.operators["gelu"] == 4


@pytest.mark.parametrize("others", [(opt.AMP(),), (opt.AMP(dtype="float16"),), (opt.OptimizerInBackward(),), (opt.Accumulation(),)])
def test_checkpointing_under_others(others: tuple[Switch, ...]) -> None:
    for make in (transformer, resnet):
        plain, other = fitted(*others, make=make), fitted(opt.Checkpointing(), *others, make=make)
        assert other.meter.losses() == plain.meter.losses()
        assert same_state(other.model, plain.model)


def test_a_copy_of_a_checkpointed_model_is_its_own() -> None:
    """Averaged weights are a copy; its blocks must not compute with the model's weights."""
    plain, other = fitted(opt.EMA(decay=0.5)), fitted(opt.EMA(decay=0.5), opt.Checkpointing())
    here, there = other.run.functions.evaluated, plain.run.functions.evaluated
    assert here is not None
    assert there is not None
    x = torch.randn(2, 8, 16)
    assert torch.equal(here.eval()(x), there.eval()(x))


def test_checkpointing_without_blocks_is_refused() -> None:
    assert opt.Checkpointing().unfit(facts_of(trainer(make=plain_net).workload))
    assert not opt.Checkpointing().unfit(facts_of(trainer().workload))
    with pytest.raises(PerftrainError, match="has none"):
        trainer(opt.Checkpointing(), make=plain_net)
    with pytest.raises(PerftrainError, match="every=5"):
        trainer(opt.Checkpointing(every=5))
    with pytest.raises(PerftrainError, match=r"\+opt=\[checkpointing,compile\]"):
        trainer(opt.Checkpointing(mode="budget"))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"mode": "half"}, r"one of full, selective, budget; it was 'half'.*Try opt\."),
        ({"every": 0}, r"Try opt\.checkpointing\.every=1"),
        ({"budget": 1.5}, r"Try opt\.checkpointing\.budget=0\.5"),
    ],
)
def test_checkpointing_refuses(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(PerftrainError, match=says):
        opt.Checkpointing(**fields)


def test_the_budget_is_set_inside_only() -> None:
    from torch._functorch import config

    before = config.activation_memory_budget
    with opt.Checkpointing(mode="budget", budget=0.3).process():
        assert config.activation_memory_budget == 0.3
    assert config.activation_memory_budget == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "checkpointing", [opt.Checkpointing(), opt.Checkpointing(mode="selective"), opt.Checkpointing(mode="budget", budget=0.0)]
)
@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_checkpointing_inside_compile(checkpointing: Switch, scope: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    switches = (checkpointing, opt.Compile(scope=scope))
    plain, other = fitted(make=resnet), fitted(*switches, make=resnet)
    assert counters["graph_break"] == {}
    assert other.meter.losses()["loss"] == pytest.approx(plain.meter.losses()["loss"], rel=1e-3)
    ours, theirs = other.model.state_dict(), plain.model.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.allclose(ours[name].float(), theirs[name].float(), atol=1e-4) for name in ours)


# --- compile ---
@pytest.mark.slow
def test_blocks_are_compiled_once_for_all() -> None:
    torch._dynamo.reset()
    counters.clear()
    made = fitted(opt.Compile(scope="blocks"), make=resnet)
    few = counters["stats"]["unique_graphs"]
    assert made.model._compiled_call_impl is None
    assert all(block._compiled_call_impl is not None for block in made.model.blocks)
    assert 1 <= few <= 2  # the first block's input needs no gradient
    assert made.meter.losses()["loss"] == pytest.approx(fitted(make=resnet).meter.losses()["loss"], rel=1e-3)


def test_compile_refuses_blocks_where_there_are_none() -> None:
    assert opt.Compile(scope="blocks").unfit(facts_of(trainer(make=plain_net).workload))
    assert not opt.Compile().unfit(facts_of(trainer(make=plain_net).workload))
    with pytest.raises(PerftrainError, match=r"Try opt\.compile\.scope=model"):
        trainer(opt.Compile(scope="blocks"), make=plain_net)
    with pytest.raises(PerftrainError, match=r"compile\.scope is one of model, blocks"):
        opt.Compile(scope="layers")


class Chatty(nn.Module):
    """Breaks the trace, and meets a batch of another size at the end of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(128, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x.flatten(1))
        torch._dynamo.graph_break()
        return out * 2


@pytest.mark.slow
def test_breaks_and_recompiles_are_reported() -> None:
    torch._dynamo.reset()
    counters.clear()
    torch._dynamo.utils.clear_compilation_metrics()
    SHAPES[Chatty] = (8, 16)
    smooth = fitted(opt.Compile(), make=plain_net)
    assert list(opt.Compile().report(smooth.model)) == ["compiled 1 graphs"]
    made = fitted(opt.Compile(dynamic=False), make=Chatty, count=20)
    graphs, breaks, again = opt.Compile().report(made.model)
    assert graphs.startswith("compiled ")
    assert "graph break" in breaks
    assert "recompile" in again
    assert "size mismatch" in again
    assert all("\n" not in line for line in (graphs, breaks, again))


# --- low precision ---
def test_low_precision_needs_the_device() -> None:
    assert "imitates" in opt.LowPrecision().unavailable(Plan())
    with pytest.raises(PerftrainError, match="low_precision cannot run here"):
        trainer(opt.LowPrecision())
    with pytest.raises(PerftrainError, match=r"Try opt\.low_precision\.dtype=float8"):
        opt.LowPrecision(dtype="int4")


def test_low_precision_needs_layers_it_can_convert() -> None:
    assert facts_of(trainer().workload)["linears_by_16"] == 8
    assert not opt.LowPrecision().unfit(facts_of(trainer().workload))
    assert opt.LowPrecision().unfit(facts_of(trainer(make=plain_net).workload))
    with pytest.raises(PerftrainError, match="has none"):
        opt.LowPrecision().model(plain_net(), Plan())


@pytest.mark.parametrize("dtype", ["float8", "int8"])
def test_low_precision_converts_and_keeps_names(dtype: str) -> None:
    """The conversion itself; what it multiplies with needs the device."""
    pytest.importorskip("torchao")
    model = transformer()
    names = [name for name, _ in model.named_parameters()]
    converted = opt.LowPrecision(dtype=dtype).model(model, Plan())
    assert [name for name, _ in converted.named_parameters()] == names
    changed = [type(m.weight).__name__ if dtype == "int8" else type(m).__name__ for m in converted.modules() if isinstance(m, nn.Linear)]
    assert sum("Float8Linear" in name or "Int8" in name for name in changed) == 8
    assert len(changed) == 9
    assert repeated_blocks(converted)
