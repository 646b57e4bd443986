"""A worker process that fails, dies, hangs or is ended: the coordinator says what happened, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from subprocess import Popen
from typing import Any

import psutil
import pytest

from perftrain.compare.channel import Worker, WorkerFailed
from tests.conftest import alive, descendants, wait_for

SPEC = {
    "recipe": {"_target_": "perftrain_recipes.digits.Digits", "steps": 20},
    "arms": {"baseline": [], "variant": [{"_target_": "perftrain.opt.workers.Workers", "num_workers": 1}]},
    "device": "cpu",
}


@pytest.fixture(scope="module")
def shared() -> Iterator[Worker]:
    with Worker(SPEC, {}) as worker:
        yield worker


def process_of(worker: Worker) -> psutil.Process:
    return psutil.Process(worker._process.pid)


def stopped(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    return [p for p in alive(processes) if p.status() == psutil.STATUS_STOPPED]


def test_an_exception_comes_back_with_its_traceback_and_the_worker_goes_on(shared: Worker) -> None:
    with pytest.raises(WorkerFailed) as caught:
        shared.call("build", arm="no such arm", seed=0)
    assert caught.value.kind == "exception"
    assert caught.value.facts["type"] == "KeyError"
    assert "Traceback (most recent call last)" in caught.value.traceback
    assert "no such arm" in caught.value.traceback
    assert len(shared.call("parity", arm="baseline", seed=0, steps=3)["losses"]) == 3


def test_progress_is_told(shared: Worker) -> None:
    told: list[dict[str, Any]] = []
    shared.call("parity", arm="baseline", seed=0, steps=4, on_progress=told.append)
    assert told[-1] == {"step": 4, "steps": 4}


def test_loader_workers_of_a_paused_arm_are_stopped_and_of_a_dropped_one_gone(shared: Worker) -> None:
    shared.call("build", arm="baseline", seed=0)
    shared.call("build", arm="variant", seed=0)
    loaders = process_of(shared).children(recursive=True)
    assert loaders
    wait_for(lambda: stopped(loaders), 2, "a stopped loader worker")
    shared.call("block", arm="variant", steps=3)
    wait_for(lambda: any(p.status() == psutil.STATUS_STOPPED for p in alive(process_of(shared).children(True))), 2, "stopped again")
    loaders = process_of(shared).children(recursive=True)
    shared.call("drop")
    wait_for(lambda: not [p for p in alive(loaders) if "resource_tracker" not in " ".join(p.cmdline())], 5, "loader workers ended")


def test_a_stopped_loader_worker_dies_with_its_killed_parent() -> None:
    with Worker(SPEC, {}) as worker:
        worker.call("build", arm="variant", seed=0)
        loaders = process_of(worker).children(recursive=True)
        wait_for(lambda: stopped(loaders), 2, "a stopped loader worker")
        process_of(worker).kill()
        wait_for(lambda: not alive(loaders), 5, "loader workers gone with their parent")
        with pytest.raises(WorkerFailed, match=r"killed by SIGKILL .*memory runs out") as caught:
            worker.call("build", arm="variant", seed=0)
        assert caught.value.kind == "killed"


def test_silence_is_a_timeout_and_end_leaves_nothing() -> None:
    worker = Worker(SPEC, {})
    try:
        worker.call("build", arm="variant", seed=0)
        family = [process_of(worker), *process_of(worker).children(recursive=True)]
        process_of(worker).suspend()
        with pytest.raises(WorkerFailed, match="no sign of life") as caught:
            worker.call("block", timeout_s=0.5, arm="variant", steps=3)
        assert caught.value.kind == "timeout"
    finally:
        worker.end()
    assert not alive(family)


def test_a_worker_that_exits_says_with_which_code(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text("import os\nprint('last words', flush=True)\nos._exit(7)\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    spec = {**SPEC, "recipe": {"_target_": "leaves.Recipe"}}
    with Worker(spec, {"PYTHONPATH": path}) as worker, pytest.raises(WorkerFailed, match="exit code 7") as caught:
        worker.call("build", arm="baseline", seed=0)
    assert "last words" in caught.value.traceback


@pytest.mark.slow
def test_nothing_outlives_a_killed_coordinator(start: Callable[..., Popen[str]], small: Sequence[str]) -> None:
    coordinator = start(*small, "+opt=workers", "opt.workers.num_workers=2", "measure.block_s=0.5", "--budget", "30")

    def with_a_stopped_one() -> list[psutil.Process]:
        family = descendants(coordinator.pid)
        return family if stopped(family) and len(family) >= 3 else []

    family = wait_for(with_a_stopped_one, 60, "a worker with loader workers, one of them stopped")
    os.kill(coordinator.pid, signal.SIGKILL)
    wait_for(lambda: not alive(family), 5, "all descendants gone")


def test_a_training_can_be_interrupted_where_the_shell_lets_it_ignore_that() -> None:
    """``perftrain ... &`` in a script: what is started so ignores SIGINT, and hands that down."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Worker(SPEC, {}) as worker:
            worker.call("build", arm="baseline", seed=0)
            worker.begin("train", arm="baseline", seed=0, steps=10_000_000)
            time.sleep(1.0)
            worker.interrupt()
            deadline = time.monotonic() + 30
            answer = worker.answer(on_progress=lambda _: in_time(deadline))
    finally:
        signal.signal(signal.SIGINT, before)
    assert answer["run"]["status"] == "interrupted"


def in_time(deadline: float) -> None:
    assert time.monotonic() < deadline, "it trains on"
