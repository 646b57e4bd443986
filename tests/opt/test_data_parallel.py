"""ddp and fsdp in two real processes: the training of one process, with its batches; each knob turns; checkpoints go across."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from perftrain import PerftrainError, opt
from perftrain.data.ranks import exchanging_last
from perftrain.facts import PHASES, StepBreakdown
from perftrain.opt.seams import Plan
from tests.opt import data_parallel_programs as programs
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
PROGRAMS = (
    "same_losses", "clipped", "accumulated", "in_bfloat16", "with_workers", "scheduled", "facts", "shares", "told_the_epoch",
    "own_randomness", "refused", "not_finite", "bucket_knobs", "static_graph", "sharded", "equal_start",
)  # fmt: skip
BOTH = ("ddp", "fsdp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has a checkpoint of one process, and gets one of each kind of ranks."""
    folder = tmp_path_factory.mktemp("checkpoints")
    made = one_in_order()
    made.fit(steps=programs.EPOCHS)
    made.save(folder / "one.pt")
    return folder


@pytest.fixture(scope="module")
def told(folder: Path) -> list[dict[str, Any]]:
    """What both ranks found, all programs in one start of the processes."""
    return run_ranks("tests.opt.data_parallel_programs", *PROGRAMS, f"checkpoints={folder}")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def one_in_order() -> Any:
    return programs.trainer(loader=torch.utils.data.DataLoader(programs.samples(), batch_size=8))


def close(here: list[float], tolerance: float = 2e-5) -> Any:
    return pytest.approx(here, rel=tolerance)


# --- the same training ---
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(
    ("program", "alone"),
    [
        ("same_losses", lambda: programs.losses()),
        ("clipped", lambda: programs.losses(clip_norm=0.1)),
        ("accumulated", lambda: programs.losses()),
        ("with_workers", lambda: programs.losses()),
    ],
)
def test_losses_are_those_of_one_process_with_the_same_batch(told: Any, name: str, program: str, alone: Callable[[], Any]) -> None:
    for rank in told:
        assert rank[program][name] == close(alone())
    assert told[0][program][name] == told[1][program][name]


@pytest.mark.parametrize("name", BOTH)
def test_with_amp_they_are_close(told: Any, name: str) -> None:
    found = told[0]["in_bfloat16"][name]
    assert found == close(programs.losses(opt.AMP()), 0.02)
    assert found != close(programs.losses())


def test_a_schedule_acts_on_the_rebuilt_optimizer(told: Any) -> None:
    model = programs.residual()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = torch.utils.data.DataLoader(programs.samples(), batch_size=8)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    made = programs.Trainer(model, programs.cross_entropy, optimizer, loader, scheduler=schedule)
    made.fit(steps=programs.STEPS)
    for name in BOTH:
        assert told[0]["scheduled"][name] == close(made.meter.losses()["loss"])


def test_each_rank_has_half_a_batch_and_counts_all_of_it(told: Any) -> None:
    for rank, found in enumerate(told):
        assert found["facts"] == {"rank": rank, "samples": [8, 8, 8], "own": [4, 4, 4], "ranks": 2}


def test_ranks_start_with_the_weights_of_rank_0(told: Any) -> None:
    torch.manual_seed(0)
    expected = programs.losses(model=torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)))
    for rank in told:
        assert rank["equal_start"] == {name: close(expected) for name in BOTH}


def test_ranks_draw_different_random_numbers(told: Any) -> None:
    (torch_0, python_0), (torch_1, python_1) = (rank["own_randomness"] for rank in told)
    assert torch_0 != torch_1
    assert python_0 != python_1


def test_a_loss_that_is_nan_on_one_rank_stops_both(told: Any) -> None:
    assert [rank["not_finite"] for rank in told] == [[2, 64], [2, 64]]


# --- who gets what ---
@pytest.mark.parametrize("name", BOTH)
def test_every_sample_is_seen_once_an_epoch_by_one_rank(told: Any, name: str) -> None:
    first, second = (rank["shares"][name] for rank in told)
    for epoch in range(3):
        parts = [seen[12 * epoch : 12 * (epoch + 1)] for seen in (first, second)]
        assert sorted(parts[0] + parts[1]) == list(range(24))
    assert first[:12] != first[12:24]


def test_batches_are_those_of_one_process_though_ranks_draw_random_numbers(told: Any) -> None:
    torch.manual_seed(5)
    torch.empty((), dtype=torch.int64).random_()  # what a DataLoader draws for its workers
    order = list(torch.utils.data.RandomSampler(range(24)))
    first, second = (rank["shares"]["ddp"][:12] for rank in told)
    for number in range(3):
        batch = order[8 * number : 8 * (number + 1)]
        part = slice(4 * number, 4 * (number + 1))
        assert (first[part], second[part]) == (batch[::2], batch[1::2])


def test_a_sampler_is_told_the_epoch(told: Any) -> None:
    for epoch in range(2):
        order = torch.randperm(24, generator=torch.Generator().manual_seed(epoch)).tolist()
        seen = [rank["told_the_epoch"][12 * epoch : 12 * (epoch + 1)] for rank in told]
        assert seen == [order[::2], order[1::2]]


# --- knobs ---
def test_buckets(told: Any) -> None:
    found = told[0]["bucket_knobs"]
    assert found["one"] == 3  # a step has one
    assert found["many"] > 6
    assert found["accumulated"] == 3  # not one for each micro-batch
    assert (found["view"], found["copy"]) == (True, False)


def test_static_graph_allows_parameters_that_are_never_used(told: Any) -> None:
    found = told[0]["static_graph"]
    assert found["static"] == close(programs.losses(model=programs.Half(), steps=3))
    assert found["accumulated"] == close(programs.losses(steps=3))
    assert "Expected to have finished reduction" in found["dynamic"]


def test_fsdp_keeps_a_part_and_gathers_it(told: Any) -> None:
    found = told[0]["sharded"]
    assert found["local"] == [32, 16]  # of (64, 16)
    assert found["state"] == [[32, 16]]
    assert found["kept"] == [False, True]  # after the forward pass: resharded, or not
    steps, units = 2, 4
    assert found["scattered"] == [steps * units, steps * units]  # micro-batches add none
    assert found["types"] == ["torch.float32", "torch.bfloat16", "torch.bfloat16"]  # as it is; asked for; amp's
    assert found["kept_in"] == "torch.float32"


def test_only_the_last_micro_batch_exchanges() -> None:
    told: list[bool] = []
    for first_step_too, expected in ((False, [False, False, True] * 2), (True, [True, True, True, False, False, True])):
        told.clear()
        forward = exchanging_last(lambda batch: batch, 3, told.append, first_step_too)
        assert [forward(n) for n in range(6)] == list(range(6))
        assert told == expected


# --- checkpoints ---
@pytest.mark.parametrize("name", BOTH)
def test_ranks_go_on_from_one_process(told: Any, folder: Path, name: str) -> None:
    made = one_in_order()
    made.fit(steps=programs.EPOCHS)
    made.fit(steps=programs.EPOCHS)
    for rank in told:
        assert rank["checkpoints"][name] == close(made.meter.losses()["loss"], 1e-4)


@pytest.mark.parametrize("name", BOTH)
def test_one_process_goes_on_from_ranks(told: Any, folder: Path, name: str) -> None:
    made = one_in_order()
    made.load(folder / f"{name}.pt")
    made.fit(steps=programs.EPOCHS)
    assert made.meter.losses()["loss"] == close(told[0]["checkpoints"][f"{name} goes on"], 1e-4)


def test_the_files_are_alike(told: Any, folder: Path) -> None:
    states = [torch.load(folder / f"{name}.pt", weights_only=True) for name in ("one", *BOTH)]
    shapes = [{key: tuple(value.shape) for key, value in state["model"].items()} for state in states]
    assert shapes[0] == shapes[1] == shapes[2]
    names = [sorted(state["optimizer"]["state"]) for state in states]
    assert names[0] == names[1] == names[2] == sorted(shapes[0])
    assert sorted(path.name for path in folder.iterdir()) == ["ddp.pt", "fsdp.pt", "one.pt"]  # nothing temporary is left


# --- mistakes ---
@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("size", r"batch_size=7 cannot be divided\. Try a batch_size of 8, or opt\.ddp\.ranks=1"),
        ("last", r"the last batch of an epoch has 1 samples\. Give the DataLoader drop_last=True"),
        ("stream", r"shares batches out by index; a Stream has none"),
        ("list", r"this program has another loader.*Give a DataLoader"),
        ("sampler", r"Take the DistributedSampler out"),
        ("unbatched", r"batch_size=None\. Give it a batch_size"),
        ("three", r"set for 3 ranks; 2 were started.*torchrun --nproc-per-node=3"),
        ("batches", r"one has 3 samples\. Give a batch sampler"),
        ("drop_last", r"^no error$"),
    ],
)
def test_what_cannot_be_shared_is_refused_on_every_rank(told: Any, case: str, says: str) -> None:
    for rank in told:
        assert re.search(says, rank["refused"][case])


@pytest.mark.parametrize("switch", [opt.DDP(), opt.FSDP()])
def test_alone_it_says_how_to_start_several(switch: Any) -> None:
    with pytest.raises(PerftrainError, match=r"2 processes must train together.*Start the script with: torchrun --nproc-per-node=2 "):
        programs.trainer(switch)


def test_they_exclude_each_other() -> None:
    with pytest.raises(PerftrainError, match="exclude each other"):
        programs.trainer(opt.DDP(), opt.FSDP())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: opt.DDP(ranks=0), r"ddp\.ranks is 1 or more.*Try opt\.ddp\.ranks=2"),
        (lambda: opt.FSDP(ranks=-1), r"fsdp\.ranks is 1 or more.*Try opt\.fsdp\.ranks=2"),
        (lambda: opt.DDP(bucket_mb=0), r"ddp\.bucket_mb is above 0"),
        (lambda: opt.FSDP(dtype="half"), r"fsdp\.dtype is one of float32, bfloat16, float16"),
        (lambda: opt.FSDP(reduce_dtype="int8"), r"fsdp\.reduce_dtype is one of"),
    ],
)
def test_bad_values(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(PerftrainError, match=says):
        make()


def test_sync_batchnorm_needs_cuda() -> None:
    assert "CUDA" in opt.DDP(sync_batchnorm=True).unavailable(Plan())


def test_no_gain_is_promised_on_cores_that_are_in_use_already() -> None:
    if torch.cuda.is_available():
        pytest.skip("there are devices")
    now = StepBreakdown(phase_s=dict.fromkeys(PHASES, 0.1), steps=10, samples=80)
    assert [switch.predict(now).high for switch in (opt.DDP(), opt.FSDP())] == [1.0, 1.0]


def test_one_rank_is_a_group_of_its_own() -> None:
    source = (
        "from tests.opt.data_parallel_programs import losses, opt\n"
        "import torch; torch.set_num_threads(1)\n"
        "print(losses() == losses(opt.DDP(ranks=1)), losses(opt.FSDP(ranks=1)) == losses())"
    )
    done = subprocess.run([sys.executable, "-c", source], env=dict(os.environ), capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == ["True", "True"], done.stderr
    assert "destroy_process_group" not in done.stderr
