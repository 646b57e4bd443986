"""Every switch, found by listing the folder: its card, its promise, off means off, its numerics, and that its knob turns."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from perftrain import PerftrainError, Trainer, opt
from perftrain.engine.trainer import facts_of
from perftrain.facts import PHASES, Bottleneck, Gain, Numerics, Place, StepBreakdown
from perftrain.opt import all_switches
from perftrain.opt.base import Switch
from perftrain.opt.huge_pages import why_no_huge_pages, with_tunable
from perftrain.opt.seams import LoaderOptions, Plan

SWITCHES = all_switches()
SLOW = {"compile"}
NAMES = [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in SWITCHES]
CPU = Plan()
SANE = 4.0
"""No switch may promise more than this for a step that is all arithmetic."""


def step_of(**phases: float) -> StepBreakdown:
    return StepBreakdown(phase_s={p: phases.get(p, 0.0) for p in PHASES}, steps=10, samples=80)


def images(count: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 3, 8, 8, generator=generator), torch.randint(0, 4, (count,), generator=generator))


def convnet() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def loader(**rest: Any) -> DataLoader[Any]:
    return DataLoader(images(), batch_size=8, shuffle=True, **rest)


def trainer(*switches: Switch, model: nn.Module | None = None, lr: float = 0.1, **rest: Any) -> Trainer:
    model = model or convnet()
    return Trainer(model, rest.pop("loss_fn", cross_entropy), torch.optim.SGD(model.parameters(), lr=lr), loader(), opt=switches, **rest)


def losses(*switches: Switch, steps: int = 10) -> list[float]:
    made = trainer(*switches)
    torch.manual_seed(5)
    made.fit(steps=steps)
    return made.meter.losses()["loss"]


def raw_losses(steps: int = 10) -> list[float]:
    """The loop that everybody writes."""
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches, found = loader(), []
    torch.manual_seed(5)
    while True:
        for x, y in batches:
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
            if len(found) == steps:
                return found


def runnable(name: str) -> Switch:
    switch = SWITCHES[name]()
    if reason := switch.unavailable(CPU) or switch.unfit(facts_of(trainer().workload)):
        pytest.skip(reason)
    if switch.plan(CPU).ranks is not None:
        pytest.skip("it needs several processes; tests/opt/test_data_parallel.py has them")
    return switch


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_with_nothing_to_act_on_says_so(name: str) -> None:
    """What ``unfit`` says, and what building then does, agree: an error, never a pretence."""
    switch = SWITCHES[name]()
    if switch.unavailable(CPU) or not switch.unfit(facts_of(trainer().workload)) or switch.environment():
        return
    with pytest.raises(PerftrainError):
        trainer(switch)


def run_python(source: str, **variables: str) -> list[str]:
    """Words printed by ``source`` in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"} | variables
    return subprocess.run([sys.executable, "-c", source], env=environment, check=True, capture_output=True, text=True).stdout.split()


# --- the card ---
@pytest.mark.parametrize("name", SWITCHES)
def test_the_card_is_complete(name: str) -> None:
    card = SWITCHES[name].card
    assert card.name == name
    assert card.summary
    assert "\n" not in card.summary
    assert isinstance(card.place, Place)
    assert isinstance(card.numerics, Numerics)
    assert all(isinstance(b, Bottleneck) for b in card.relieves)
    assert card.cost
    assert isinstance(card.requires, tuple)
    assert all(isinstance(text, str) and text for text in (*card.requires, *card.conflicts))
    assert set(card.conflicts) <= set(SWITCHES) - {name}
    assert card.relieves or SWITCHES[name]().predict(step_of(forward=1)).high <= 1.0, "what relieves nothing promises nothing"
    assert SWITCHES[name].__doc__


@pytest.mark.parametrize("name", SWITCHES)
def test_it_is_found_by_its_class_name(name: str) -> None:
    assert getattr(opt, SWITCHES[name].__name__) is SWITCHES[name]


def test_a_class_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="no switch class 'Fast'"):
        _ = opt.Fast


@pytest.mark.parametrize("name", SWITCHES)
def test_it_is_frozen_and_equal_to_its_like(name: str) -> None:
    assert SWITCHES[name]() == SWITCHES[name]()
    hash(SWITCHES[name]())
    with pytest.raises(AttributeError):
        SWITCHES[name]().anything = 1


# --- the promise ---
@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("now", [step_of(forward=1, backward=2), step_of(data_wait=9, forward=1), step_of(rest=1), step_of()])
def test_predictions_are_sane(name: str, now: StepBreakdown) -> None:
    gain = SWITCHES[name]().predict(now)
    assert isinstance(gain, Gain)
    assert gain.because
    if name == "delay":
        assert (gain.low, gain.high) == (1 / 1.05, 1 / 1.05)
        return
    assert 1.0 <= gain.low <= gain.high
    bound = 1 / (1 - now.share("data_wait")) if now.share("data_wait") < 1 else float("inf")
    assert gain.high <= max(SANE, bound * 1.01)


@pytest.mark.parametrize("name", [n for n in SWITCHES if n != "delay"])
def test_predictions_follow_amdahl(name: str) -> None:
    """What a switch shrinks bounds what it gives: nothing where that is absent, more the larger it is."""
    switch = SWITCHES[name]()
    assert switch.predict(step_of(rest=1)).high == pytest.approx(1.0)
    for phase in ("data_wait", "forward", "backward", "optimizer"):
        high = [switch.predict(step_of(**{phase: share, "rest": 1 - share})).high for share in (0.01, 0.3, 0.6, 0.9)]
        assert high == sorted(high)
        assert all(h <= 1 / (1 - share) + 1e-9 for h, share in zip(high, (0.01, 0.3, 0.6, 0.9), strict=True))


# --- off means off ---
def global_state() -> dict[str, Any]:
    b = torch.backends
    places = {"matmul": b.cuda.matmul, "conv": b.cudnn.conv, "rnn": b.cudnn.rnn}
    places |= {"cpu matmul": b.mkldnn.matmul, "cpu conv": b.mkldnn.conv, "cpu rnn": b.mkldnn.rnn, "all": b}
    return {
        **{name: place.fp32_precision for name, place in places.items()},
        "threads": torch.get_num_threads(),
        "interop": torch.get_num_interop_threads(),
        "gc": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()),
        "cudnn": (b.cudnn.enabled, b.cudnn.benchmark, b.cudnn.deterministic),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        # torch's compiler notes things for itself, already on the first optimizer step of anybody
        "environment": {k: v for k, v in os.environ.items() if "TORCHINDUCTOR" not in k},
    }


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("fails", [False, True])
def test_process_restores_everything(name: str, fails: bool) -> None:
    switch, before = SWITCHES[name](), global_state()
    with pytest.raises(ZeroDivisionError) if fails else nullcontext(), switch.process():
        assert 1 // (0 if fails else 1)
    assert global_state() == before


@pytest.mark.parametrize("name", NAMES)
def test_training_restores_everything(name: str) -> None:
    switch = runnable(name)
    if switch.environment():
        pytest.skip("it works through variables; tested in a process of its own")
    before = global_state()
    trainer(switch).fit(steps=1)
    assert global_state() == before


def test_importing_sets_nothing() -> None:
    source = (
        "import torch; b = torch.backends; f = lambda: (b.fp32_precision, b.mkldnn.matmul.fp32_precision, "
        "torch.get_num_threads());"
        "before = f(); from perftrain.opt import all_switches; all_switches(); print(before == f())"
    )
    assert run_python(source) == ["True"]


# --- numerics ---
def test_off_is_a_raw_loop_bit_for_bit() -> None:
    assert losses() == raw_losses()


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_what_the_card_says(name: str) -> None:
    switch = runnable(name)
    if switch.environment():
        source = "import sys; sys.path.insert(0, sys.argv[1]) if sys.argv[1:] else None\n"
        source += f"sys.path.insert(0, {os.path.dirname(__file__)!r})\nfrom test_every_switch import losses; print(*losses())"
        here = [float(word) for word in run_python(source)]
        there = [float(word) for word in run_python(source, **switch.environment())]
    else:
        here, there = losses(), losses(switch)
    if switch.card.numerics is Numerics.EXACT:
        assert here == there
    elif switch.card.numerics is Numerics.CLOSE:
        assert there == pytest.approx(here, rel=0.02)
    assert len(there) == 10


# --- each knob turns ---
class Spy(nn.Module):
    """Notes what passes through the middle of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach())
        return x


def spied() -> tuple[nn.Sequential, Spy]:
    spy, layers = Spy(), list(convnet())
    return nn.Sequential(layers[0], spy, *layers[1:]), spy


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_amp_computes_in_its_type(dtype: str) -> None:
    model, spy = spied()
    trainer(opt.AMP(dtype=dtype), model=model).fit(steps=2)
    assert {str(t.dtype) for t in spy.seen} == {f"torch.{dtype}"}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_amp_float16_skips_a_step_whose_gradient_is_infinite() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        loss = cross_entropy(output, target)
        if len(calls) == 2:  # finite, but its gradient is not
            loss = loss + torch.sqrt((output * 0).sum())
        return loss

    def weights() -> Tensor:
        return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()

    calls: list[int] = []
    model = convnet()
    seen = [weights()]
    trainer(opt.AMP(dtype="float16"), model=model, loss_fn=loss_fn).fit(steps=3, on_step=lambda step: seen.append(weights()))
    moved = [not torch.equal(a, b) for a, b in pairwise(seen)]
    assert moved == [True, False, True]
    assert all(w.isfinite().all() for w in seen)


def test_amp_float16_unscales_before_clipping() -> None:
    def moved(*switches: Switch) -> float:
        model = convnet()
        before = [p.detach().clone() for p in model.parameters()]
        trainer(*switches, model=model, lr=1.0, clip_norm=1000.0).fit(steps=1)  # far above the gradient, far below the scaled one
        return float(torch.cat([(p.detach() - b).flatten() for p, b in zip(model.parameters(), before, strict=True)]).norm())

    torch.manual_seed(5)
    plain = moved()
    torch.manual_seed(5)
    assert moved(opt.AMP(dtype="float16")) == pytest.approx(plain, rel=0.02)


@pytest.mark.parametrize("precision", ["tf32", "ieee", "bf16"])
def test_tf32_sets_its_precision_inside_only(precision: str) -> None:
    cpu = not torch.cuda.is_available()
    if not cpu and precision == "bf16":
        pytest.skip("CUDA has no such setting")
    place = torch.backends.mkldnn.matmul if cpu else torch.backends.cuda.matmul
    before = place.fp32_precision
    seen: list[str] = []
    made = trainer(opt.TF32(precision=precision))
    assert place.fp32_precision == before
    made.fit(steps=1, on_step=lambda step: seen.append(place.fp32_precision))
    assert seen == [precision]
    assert place.fp32_precision == before
    assert precision in opt.TF32(precision=precision).describe(CPU)


def test_channels_last_reorders_weights_and_images() -> None:
    model, spy = spied()
    trainer(opt.ChannelsLast(), model=model).fit(steps=1)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert model[0].weight.stride()[1] == 1
    assert spy.seen[0].stride()[1] == 1
    front = nn.Sequential(Spy(), *convnet())
    trainer(opt.ChannelsLast(), model=front).fit(steps=1)
    assert front[0].seen[0].stride() == (192, 1, 24, 3)
    plain, spy = spied()
    trainer(model=plain).fit(steps=1)
    assert spy.seen[0].stride()[3] == 1


def test_channels_last_without_convolutions_is_refused() -> None:
    with pytest.raises(PerftrainError, match="has none"):
        trainer(opt.ChannelsLast(), model=nn.Sequential(nn.Flatten(), nn.Linear(192, 4)))
    assert opt.ChannelsLast().unfit({"convolutions": 0})
    assert not opt.ChannelsLast().unfit({"convolutions": 3})


@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_compile_prepares_the_model_in_place(mode: str) -> None:
    model = convnet()
    made = trainer(opt.Compile(mode=mode), model=model)  # nothing is compiled before the first step
    assert made.model is model
    assert model._compiled_call_impl is not None
    assert trainer().model._compiled_call_impl is None


def test_workers_are_as_many_as_asked() -> None:
    options = opt.Workers(num_workers=2).loader(LoaderOptions.of(loader()))
    built = options.build()
    assert built.num_workers == 2
    assert opt.Workers().count() == min(8, len(os.sched_getaffinity(0)))

    def samples(batches: Any) -> list[Any]:
        torch.manual_seed(5)
        return [[x.tolist(), y.tolist()] for x, y in batches]

    assert samples(built) == samples(loader())


class Pause(nn.Module):
    """Most of a step, and the same on a busy machine."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.004)
        return x


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine take many times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer"])
def test_delay_makes_one_phase_longer(phase: str) -> None:
    def busy(*switches: Switch) -> StepBreakdown:
        model = nn.Sequential(Pause(), nn.Flatten(), nn.Linear(192, 4))
        made = trainer(*switches, model=model, lr=0.01)
        made.fit(steps=50)
        rows = made.rows[10:]
        undisturbed = sorted(rows, key=lambda row: row.step_s)[2]  # other programs may only lengthen a step
        return StepBreakdown(undisturbed.phase_s, 1, 0)

    name = "data_wait" if phase == "data" else phase
    plain, slow = busy(), busy(opt.Delay(fraction=1.0, phase=phase))
    assert 1.5 < slow.step_s / plain.step_s < 2.6
    added = {p: slow.phase_s[p] - plain.phase_s.get(p, 0.0) for p in slow.phase_s}
    assert added[name] == max(added.values())
    assert added[name] > 0.5 * plain.step_s


def test_no_delay_is_no_delay() -> None:
    assert losses(opt.Delay(fraction=0.0)) == losses()
    assert opt.Delay(fraction=1.0).predict(step_of(rest=1)).high == 0.5


def test_nothing_changes_nothing() -> None:
    made, options = trainer(opt.Nothing()), LoaderOptions.of(loader())
    assert made.model is made.workload.model
    assert made.optimizer is made.workload.optimizer
    assert opt.Nothing().loader(options) is options
    assert opt.Nothing().environment() == {}
    assert opt.Nothing().plan(CPU) == CPU


# --- variables ---
ALLOCATE = """
import re, torch
read = lambda: int(re.search(r"AnonHugePages:\\s+(\\d+)", open("/proc/self/smaps_rollup").read())[1])
before = read()
kept = [torch.ones(16 * 1024 * 1024) for _ in range(2)]
import os
print(os.environ.get("GLIBC_TUNABLES"), read() - before)
"""


@pytest.fixture(scope="module")
def huge_pages() -> Switch:
    if reason := why_no_huge_pages():
        pytest.skip(reason)
    return opt.HugePages()


def test_huge_pages_hold_big_tensors(huge_pages: Switch) -> None:
    off = run_python(ALLOCATE)
    on = run_python(ALLOCATE, **huge_pages.environment())
    assert off[0] == "None"
    assert "glibc.malloc.hugetlb=1" in on[0]
    assert int(on[1]) >= int(off[1]) + 64 * 1024  # kB: at least half of the 128 MiB


def test_huge_pages_keep_other_tunables() -> None:
    assert with_tunable("") == "glibc.malloc.hugetlb=1"
    assert with_tunable("glibc.malloc.arena_max=1:glibc.malloc.hugetlb=0") == "glibc.malloc.arena_max=1:glibc.malloc.hugetlb=1"


# --- mistakes ---
@pytest.mark.parametrize(
    ("name", "fields", "says"),
    [
        ("amp", {"dtype": "float8"}, r"amp\.dtype is one of bfloat16, float16; it was 'float8'"),
        ("tf32", {"precision": "fp16"}, r"tf32\.precision is one of tf32, bf16, ieee; it was 'fp16'"),
        ("compile", {"mode": "fast"}, r"compile\.mode is one of default, reduce-overhead, .*; it was 'fast'"),
        ("delay", {"phase": "evaluation"}, r"delay\.phase is one of data, forward, backward, optimizer; it was 'evaluation'"),
        ("delay", {"fraction": -0.1}, r"delay\.fraction lies between 0 and 10; it was -0\.1"),
        ("delay", {"fraction": float("nan")}, r"delay\.fraction lies between"),
        ("workers", {"num_workers": -1}, r"workers\.num_workers is 0 or more; it was -1"),
    ],
)
def test_a_bad_value_is_refused_and_the_choices_named(name: str, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(PerftrainError, match=says + r".*Try opt\."):
        SWITCHES[name](**fields)
