"""Starting a program that is watched, waiting for it, ending it, and reading what its processes left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import perftrain
from perftrain.attach.orders import Orders
from perftrain.facts import PerftrainError

BOOTSTRAP = Path(__file__).parent / "bootstrap"
GRACE_S = 8.0
"""How long a program may take to end after it was told to, or after a rank of it was done."""


@dataclass(frozen=True)
class Watched:
    """What came of one run."""

    processes: list[dict[str, Any]]
    """The training processes, rank 0 first."""
    fetchers: list[dict[str, Any]]
    """The DataLoader's workers, and training processes that fetch by themselves."""
    code: int
    """The program's exit code; 0 if it was ended from here."""
    seconds: float
    ended_early: bool
    error: str = ""
    """The end of what it said on standard error, if that was kept."""


def command_of(program: Sequence[str], folder: str | None = None) -> list[str]:
    """The Python command line for ``train.py args`` or ``-m package.module args``.

    Raises:
        PerftrainError: no such script or module.
    """
    name = program[0]
    if name == "-m":
        if len(program) < 2:
            raise PerftrainError("-m needs the name of a module: perftrain diagnose -m package.train.")
        return [sys.executable, "-m", *program[1:]]
    if not (Path(folder or ".") / name).is_file():
        raise PerftrainError(
            f"There is no script {name!r} in {folder or Path.cwd()}. Type the path of a Python file, or -m package.module."
        )
    return [sys.executable, *program]


LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
"""Modules that start a script in several ranks: ``-m torch.distributed.run --nproc-per-node 2 train.py``."""


def folder_of(program: Sequence[str]) -> str:
    """Where the user's own code lies: beside the script, also if a launcher starts it; else here."""
    if program[0] != "-m":
        return str(Path(program[0]).resolve().parent)
    scripts = (w for w in program[2:] if w.endswith(".py") and Path(w).is_file())
    script = next(scripts, None) if program[1] in LAUNCHERS else None
    return str(Path(script).resolve().parent if script else Path.cwd())


def watch(
    program: Sequence[str],
    orders: Orders,
    say: Callable[[int, float], None],
    limit_s: float,
    quiet: bool = False,
    environment: dict[str, str] | None = None,
    folder_of_program: str | None = None,
    under: Sequence[str] = (),
    grace_s: float = GRACE_S,
) -> Watched:
    """Run ``program`` under ``orders`` until it ends, has shown enough, or ``limit_s`` are over.

    Args:
        say: called about four times a second with the steps done and the seconds since the start.
        quiet: throw the program's output away (but for its errors); else it goes where ours goes.
        folder_of_program: where it runs, and what its path is relative to; here, if not given.
        under: a command line that takes the program's as its last arguments (a profiler); it has ``grace_s`` to finish afterwards.
    """
    command = [*under, *command_of(program, folder_of_program)]
    with tempfile.TemporaryDirectory(prefix="perftrain-") as folder:
        orders = replace(orders, folder=folder)
        path = Path(folder) / "orders.json"
        orders.write(path)
        with open(Path(folder) / "stderr", "w+b") as errors:
            process = subprocess.Popen(
                command, cwd=folder_of_program, env=_environment(path, environment or {}), 
                stdin=subprocess.DEVNULL if quiet else None, stdout=subprocess.DEVNULL if quiet else None,
                stderr=errors if quiet else None,
            )  # fmt: skip
            began = time.perf_counter()
            try:
                early = _wait(process, Path(folder), say, limit_s, grace_s)
            except BaseException:
                _end(process)
                raise
            seconds = time.perf_counter() - began
            errors.seek(0)
            said = errors.read()[-4000:].decode(errors="replace")
        processes, fetchers = _read(Path(folder))
    code = process.returncode
    return Watched(processes, fetchers, 0 if early else code, seconds, early, said)


def _environment(orders: Path, more: dict[str, str]) -> dict[str, str]:
    package = str(Path(perftrain.__file__).parent.parent)
    before = [p for p in {**os.environ, **more}.get("PYTHONPATH", "").split(os.pathsep) if p]
    reachable = [] if package in before or "site-packages" in package else [package]
    return {
        "KINETO_LOG_LEVEL": "99", **os.environ, **more, "PERFTRAIN_ATTACH": str(orders),
        "PYTHONPATH": os.pathsep.join([str(BOOTSTRAP), *before, *reachable]),
    }  # fmt: skip


def _wait(process: subprocess.Popen[bytes], folder: Path, say: Callable[[int, float], None], limit_s: float, grace_s: float) -> bool:
    """Whether the program was ended from here. Once one process has left its record, the others get a little time."""
    began, done_at = time.perf_counter(), None
    while process.poll() is None:
        now = time.perf_counter() - began
        say(_steps(folder), now)
        if done_at is None and any(folder.glob("process-*.json")):
            done_at = now
        if now > limit_s:
            _end(process)
            return True
        if done_at is not None and now > done_at + grace_s and (folder / "enough").exists():
            _end(process)
            return True
        time.sleep(0.25)
    return (folder / "enough").exists()


def _steps(folder: Path) -> int:
    found = 0
    for path in folder.glob("status-*.json"):
        try:
            found = max(found, int(json.loads(path.read_text())["steps"]))
        except (OSError, ValueError):
            continue
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the program and its children, then SIGKILL to what is left."""
    import psutil

    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for number, wait_s in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 3.0)):
        for each in family:
            try:
                each.send_signal(number)
            except psutil.NoSuchProcess:
                continue
        _, family = psutil.wait_procs(family, wait_s)
    process.wait(5)


def _read(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    def all_of(pattern: str) -> list[dict[str, Any]]:
        return [json.loads(p.read_text()) for p in sorted(folder.glob(pattern))]

    processes = sorted(all_of("process-*.json"), key=lambda p: (p.get("rank", 0), -len(p["rows"])))
    return processes, all_of("fetch-*.json")
