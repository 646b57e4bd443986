"""The gate's arithmetic on timings that are made up, and its worktree on a repository that is real."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from perftrain.compare import gate
from perftrain.facts import PerftrainError


def timed(monkeypatch: Any, seconds: dict[str | None, float], scatter: float = 0.01) -> None:
    """Every run takes the seconds of its folder, give or take ``scatter``."""
    rng = random.Random(1)

    def run_step_s(program: Sequence[str], each_s: float, tell: Any, what: str, folder: str | None = None) -> float:
        key = None if folder is None else ("old" if "perftrain-" in folder else "new")
        return seconds[key] * rng.gauss(1, scatter)

    monkeypatch.setattr(gate, "run_step_s", run_step_s)


def silent(what: str, spent: float, may: float) -> None:
    pass


@pytest.mark.parametrize(("now", "slower"), [(0.1, False), (0.101, False), (0.115, True), (0.08, False)])
def test_against_stored_timings(monkeypatch: Any, now: float, slower: bool) -> None:
    timed(monkeypatch, {None: 0.1})
    stored = gate.record(["train.py"], 1, silent)
    timed(monkeypatch, {None: now})
    found = gate.against_stored(["train.py"], stored, 1, 0.02, silent)
    assert found.slower is slower
    assert found.low < now / 0.1 < found.high
    assert found.resolution > 0.02


def test_timings_of_another_machine_are_refused(monkeypatch: Any) -> None:
    timed(monkeypatch, {None: 0.1})
    stored = {**gate.record(["train.py"], 1, silent), "torch": "1.0"}
    with pytest.raises(PerftrainError, match=r"torch was '1\.0'"):
        gate.against_stored(["train.py"], stored, 1, 0.02, silent)


def test_false_alarms_are_rare(monkeypatch: Any) -> None:
    alarms = 0
    for seed in range(60):
        rng = random.Random(seed)
        monkeypatch.setattr(gate, "run_step_s", lambda *a, rng=rng: 0.1 * rng.gauss(1, 0.03))
        stored = gate.record(["train.py"], 1, silent)
        alarms += gate.against_stored(["train.py"], stored, 1, 0.02, silent).slower
    assert alarms <= 4


def test_against_an_older_revision(monkeypatch: Any, tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "train.py").write_text("")
    git("add", ".")
    git("commit", "-m", "first")
    monkeypatch.chdir(tmp_path)
    timed(monkeypatch, {"old": 0.1, "new": 0.12})
    found = gate.against_revision(["train.py"], "HEAD", 1, 0.02, silent)
    assert found.slower
    assert found.slowdown == pytest.approx(1.2, rel=0.05)
    listed = subprocess.run(["git", "worktree", "list"], cwd=tmp_path, capture_output=True, text=True).stdout
    assert len(listed.splitlines()) == 1, "the worktree is gone"
    with pytest.raises(PerftrainError, match="git said"):
        gate.against_revision(["train.py"], "nowhere", 1, 0.02, silent)
