"""The command line in a process of its own, small settings, and processes that can be asked whether they are still there."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

SMALL = (
    "recipe=digits", "recipe.steps=60", "measure.parity_steps=5", "measure.parity_seeds=2", "measure.processes=1",
    "measure.block_s=0.03", "measure.max_cycles=2",
)  # fmt: skip


Told = subprocess.CompletedProcess[str]


def run_cli(*arguments: str, cwd: Path, env: dict[str, str] | None = None, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """``python -m perftrain`` in a process of its own."""
    line = [sys.executable, "-m", "perftrain", *arguments]
    return subprocess.run(line, cwd=cwd, env={**os.environ, **(env or {})}, timeout=timeout_s, capture_output=True, text=True)


@pytest.fixture
def small() -> Sequence[str]:
    return SMALL


@pytest.fixture
def cli(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    return lambda *arguments, **rest: run_cli(*arguments, cwd=rest.pop("cwd", tmp_path), **rest)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """The command line, left running; killed at the end of the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "perftrain", *arguments], cwd=tmp_path, env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def wait_for(seen: Callable[[], Any], seconds: float, what: str) -> Any:
    """The first true answer of ``seen``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := seen():
            return found
        time.sleep(0.02)
    raise AssertionError(f"{what}: not within {seconds} s")


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that still run: not reaped zombies either."""
    running = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                running.append(process)
        except psutil.NoSuchProcess:
            continue
    return running
