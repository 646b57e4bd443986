"""A comparison of several ranks with one process: they work as one, stand still as one, fail as one, and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess, Popen
from typing import Any

import psutil
import pytest
import torch

from perftrain.compare.channel import Worker, WorkerFailed
from perftrain.compare.ranks import put_together
from tests.conftest import alive, descendants, wait_for

pytestmark = pytest.mark.distributed
DDP, FSDP = {"_target_": "perftrain.opt.ddp.DDP"}, {"_target_": "perftrain.opt.fsdp.FSDP"}
WORKERS = {"_target_": "perftrain.opt.workers.Workers", "num_workers": 1}


def spec(*opts: dict[str, Any], recipe: str = "perftrain_recipes.digits.Digits", **settings: Any) -> dict[str, Any]:
    return {
        "recipe": {"_target_": recipe, "steps": 20, **settings},
        "arms": {"baseline": [], "variant": list(opts)},
        "device": "cpu",
    }


@pytest.fixture(scope="module")
def shared() -> Iterator[Worker]:
    with Worker(spec(DDP), {}) as worker:
        worker.call("build", arm="variant", seed=0)
        worker.call("drop")
        yield worker


def ranks_of(worker: Worker) -> list[psutil.Process]:
    """Rank 0, and the others, which it has started in sessions of their own."""
    first = psutil.Process(worker._process.pid)
    return [first, *(p for p in first.children() if os.getsid(p.pid) == p.pid)]


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


# --- as one ---
@pytest.mark.parametrize("switch", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_losses_are_the_baselines_and_memory_is_that_of_all(switch: dict[str, Any]) -> None:
    with Worker(spec(switch), {}) as worker:
        alone = worker.call("parity", arm="baseline", seed=0, steps=30)
        together = worker.call("parity", arm="variant", seed=0, steps=30)
    assert together["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    assert 1.5 < together["peak_bytes"] / alone["peak_bytes"] < 3


def test_three_ranks_with_loader_workers_of_their_own() -> None:
    with Worker(spec({**DDP, "ranks": 3}, WORKERS, batch_size=48), {}) as worker:
        alone = worker.call("parity", arm="baseline", seed=0, steps=5)
        together = worker.call("parity", arm="variant", seed=0, steps=5)
        assert together["losses"] == pytest.approx(alone["losses"], rel=1e-4)
        assert len(ranks_of(worker)) == 3


def test_while_the_other_arm_has_its_turn_the_ranks_stand_still() -> None:
    with Worker(spec(DDP, WORKERS), {}) as worker:
        for arm in ("baseline", "variant"):
            worker.call("build", arm=arm, seed=0)
        _, second = ranks_of(worker)
        loaders = second.children()
        assert loaders
        family = [second, *loaders]
        before = [cpu_s(process) for process in family]
        begin = time.monotonic()
        while time.monotonic() - begin < 0.5:
            worker.call("block", arm="baseline", steps=50)
        assert [cpu_s(process) - s for process, s in zip(family, before, strict=True)] == pytest.approx([0, 0], abs=0.021)
        assert [process.status() for process in loaders] == [psutil.STATUS_STOPPED]
        worker.call("block", arm="variant", steps=50)
        assert cpu_s(second) > before[0]


def test_the_baseline_keeps_its_threads_and_ranks_share_them(shared: Worker) -> None:
    def threads(arm: str) -> int:
        return shared.call("train", arm=arm, seed=0, steps=2)["run"]["environment"]["threads"]

    both = (threads("variant"), threads("baseline"), threads("variant"))
    assert both == (max(1, both[1] // 2), both[1], max(1, both[1] // 2))


def test_a_whole_training_run(shared: Worker) -> None:
    found = shared.call("train", arm="variant", seed=0, steps=60)
    alone = shared.call("train", arm="baseline", seed=0, steps=60)
    assert found["failure"] is None
    assert found["run"]["environment"]["ranks"] == 2
    assert found["run"]["metrics"]["accuracy"] == pytest.approx(alone["run"]["metrics"]["accuracy"], abs=0.02)
    assert {row["samples"] for row in found["rows"]} == {64}
    assert found["run"]["peak_bytes"] > 1.5 * alone["run"]["peak_bytes"]


def test_groups_beside_each_other_do_not_meet() -> None:
    def losses(seed: int) -> list[float]:
        with Worker(spec(DDP), {}) as worker:
            return worker.call("parity", arm="variant", seed=seed, steps=5)["losses"]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(losses, (0, 1))
    assert first != second
    assert first == losses(0)


def test_memory_is_that_of_the_fullest_device_or_of_the_whole_machine() -> None:
    mine, other = {"losses": [1.0], "peak_bytes": 2}, {"losses": [3.0], "peak_bytes": 5}
    assert put_together(mine, [other], torch.device("cuda")) == {"losses": [1.0], "peak_bytes": 5}
    assert put_together(mine, [other], torch.device("cpu")) == {"losses": [1.0], "peak_bytes": 7}
    assert put_together(mine, [{"peak_bytes": None}], torch.device("cpu"))["peak_bytes"] is None
    assert put_together({"seconds": 1.0}, [{"seconds": 2.0}], torch.device("cpu")) == {"seconds": 1.0}


# --- failing as one ---
TROUBLE = """
import os, signal, sys, time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from perftrain import Workload


@dataclass(frozen=True)
class Recipe:
    rank: int
    how: str
    steps: int = 20

    def build(self, seed):
        torch.manual_seed(seed)
        model = nn.Linear(4, 1)
        calls = []

        def step(model, batch):
            calls.append(1)
            if len(calls) == 6 and dist.is_initialized() and dist.get_rank() == self.rank:
                if self.how == "raises":
                    raise OSError("the disk is gone")
                os.kill(os.getpid(), signal.SIGKILL)
            return model(batch[0]).square().mean()

        if self.how == "does not build" and dist.is_initialized() and dist.get_rank() == self.rank:
            raise OSError("no such data")
        return Workload(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(torch.randn(32, 4)), 8), step=step)
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "trouble.py").write_text(TROUBLE)
    return os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))


@pytest.mark.parametrize("command", ["parity", "train", "build"])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_on_one_rank_comes_back_at_once_with_its_traceback(path: str, rank: int, command: str) -> None:
    how = "does not build" if command == "build" else "raises"
    with Worker(spec(DDP, recipe="trouble.Recipe", rank=rank, how=how), {"PYTHONPATH": path}) as worker:
        steps = {} if command == "build" else {"steps": 20}
        begin = time.monotonic()
        if command == "train" and rank == 0:  # what was measured until then comes with it
            failure = worker.call("train", arm="variant", seed=0, **steps)["failure"]
            assert failure["message"] == "the disk is gone"
        else:
            with pytest.raises(WorkerFailed) as caught:
                worker.call(command, arm="variant", seed=0, **steps)
            failure = caught.value.facts
            assert failure["type"] == "OSError"
        assert "OSError: " in failure["traceback"]
        assert ("rank 1" in failure["traceback"]) == (rank == 1)
        assert time.monotonic() - begin < 60
        others = descendants(worker._process.pid)
    wait_for(lambda: not alive(others), 5, "ranks gone")


def test_a_rank_that_is_killed_is_named(path: str) -> None:
    with Worker(spec(DDP, recipe="trouble.Recipe", rank=1, how="is killed"), {"PYTHONPATH": path}) as worker:
        with pytest.raises(WorkerFailed, match=r"rank 1: the process was killed by SIGKILL"):
            worker.call("parity", arm="variant", seed=0, steps=20)
        family = descendants(worker._process.pid)
    wait_for(lambda: not alive(family), 5, "ranks gone")


def test_what_cannot_be_shared_is_refused_in_the_switchs_own_words() -> None:
    with Worker(spec(DDP, batch_size=63), {}) as worker, pytest.raises(WorkerFailed) as caught:
        worker.call("parity", arm="variant", seed=0, steps=5)
    assert caught.value.facts["type"] == "PerftrainError"
    assert "batch_size=63 cannot be divided. Try a batch_size of 64" in caught.value.facts["message"]


def test_an_interrupted_training_answers_with_what_it_has() -> None:
    with Worker(spec(DDP), {}) as worker:
        worker.call("build", arm="variant", seed=0)
        worker.begin("train", arm="variant", seed=0, steps=1_000_000)
        time.sleep(1.5)
        _, other = ranks_of(worker)
        worker.interrupt()
        answer = worker.answer(20)
        assert answer["run"]["status"] == "interrupted"
        assert len(answer["rows"]) > 50
        assert not alive([other])


# --- nothing is left ---
def test_ranks_end_with_their_worker_and_die_with_it() -> None:
    with Worker(spec(DDP), {}) as worker:
        worker.call("build", arm="variant", seed=0)
        ended = ranks_of(worker)
    assert not alive(ended)
    with Worker(spec(DDP, WORKERS), {}) as worker:
        worker.call("build", arm="variant", seed=0)
        family = [p for rank in ranks_of(worker) for p in (rank, *rank.children(recursive=True))]
        assert len(family) >= 4
        family[0].kill()
        wait_for(lambda: not alive(family), 5, "ranks and their loader workers gone")


@pytest.mark.slow
def test_nothing_outlives_a_killed_coordinator(start: Callable[..., Popen[str]], small: Sequence[str]) -> None:
    coordinator = start(*small, "+opt=ddp", "measure.block_s=0.5", "--budget", "30")

    def with_ranks() -> list[psutil.Process]:
        family = descendants(coordinator.pid)
        try:
            return family if len(family) >= 2 and any("--" not in p.cmdline() and p.ppid() != coordinator.pid for p in family) else []
        except psutil.Error:  # one of them ended while it was looked at: look again
            return []

    family = wait_for(with_ranks, 90, "a worker with another rank")
    os.kill(coordinator.pid, signal.SIGKILL)
    wait_for(lambda: not alive(family), 5, "all descendants gone")


# --- end to end ---
Cli = Callable[..., CompletedProcess[str]]


@pytest.mark.slow
@pytest.mark.parametrize("opts", ["ddp", "fsdp", "[ddp,amp]"])
def test_a_verdict(cli: Cli, small: Sequence[str], tmp_path: Path, opts: str) -> None:
    done = cli(*small, f"+opt={opts}", "--budget", "4", "--json", "verdict.json", timeout_s=200)
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = json.loads((tmp_path / "verdict.json").read_text())["verdict"]
    assert verdict["decision"] in ("slower", "no_difference", "not_resolved", "faster")
    assert verdict["parity"]["holds"] is True
    assert "2 ranks over gloo" in " ".join(done.stdout.split())
    samples = {arm: verdict[arm]["breakdown"]["samples"] / verdict[arm]["breakdown"]["steps"] for arm in ("baseline", "variant")}
    assert samples == {"baseline": 64, "variant": 64}


@pytest.mark.slow
def test_a_batch_that_ranks_cannot_share_is_a_verdict(cli: Cli, small: Sequence[str], tmp_path: Path) -> None:
    done = cli(*small, "+opt=ddp", "recipe.batch_size=63", "--budget", "4", "--json", "verdict.json", timeout_s=200)
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = json.loads((tmp_path / "verdict.json").read_text())["verdict"]
    assert verdict["decision"] == "does_not_run"
    assert "batch_size=63 cannot be divided" in verdict["reason"]
