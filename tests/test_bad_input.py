"""Mistakes, broken files, failing programs and signals: the error names the rule, what was seen and what to type.

Switches and recipes of one's own are given through ``--config-dir DIR`` (with ``DIR/opt/*.yaml``, ``DIR/recipe/*.yaml``), whose
``_target_`` names a class in a module on PYTHONPATH. An ``opt`` file starts with ``# @package opt.<its name>``.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from perftrain.cli import main
from tests.conftest import SMALL, alive, descendants, run_cli

MINE = '''
import os
import signal
import time
from dataclasses import dataclass, replace

import torch
from perftrain.facts import Card, Numerics, Place
from perftrain.opt.base import Switch
from perftrain_recipes.digits import Digits


@dataclass(frozen=True)
class Bad(Switch):
    """A switch that fails in one of several ways."""

    how: str = "no_number"
    card = Card(name="bad", summary="fails", place=Place.EDIT, numerics=Numerics.CLOSE, cost="")

    def step(self, functions):
        def forward(batch):
            losses = functions.forward(batch)
            if self.how == "memory":
                raise MemoryError("no room for the batch")
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            return {k: v * float("nan") for k, v in losses.items()}

        return replace(functions, forward=forward)


@dataclass(frozen=True)
class Mine(Digits):
    """The digits with a mistake in it."""

    how: str = "raises"

    def build(self, seed):
        workload = super().build(seed)

        def broken(output, target):
            if self.how == "raises":
                return the_users_own_function(output, target)
            if self.how == "slow":
                time.sleep(0.05)
            loss = workload.loss_fn(output, target)
            return loss * float("nan") if self.how == "no_number" else loss

        return replace(workload, loss_fn=broken)


def the_users_own_function(output, target):
    raise RuntimeError(f"the user's own mistake: {tuple(output.shape)} and {tuple(target.shape)}")
'''


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Sequence[str], dict[str, str]]:
    """Flags and variables with which ``+opt=no_number|memory|killed`` and ``recipe=mine`` exist."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "my_module.py").write_text(MINE)
    (folder / "opt").mkdir()
    (folder / "recipe").mkdir()
    for how in ("no_number", "memory", "killed"):
        (folder / "opt" / f"{how}.yaml").write_text(f"# @package opt.{how}\n_target_: my_module.Bad\nhow: {how}\n")
    (folder / "recipe" / "mine.yaml").write_text("_target_: my_module.Mine\nbatch_size: 64\nsteps: 60\nhow: raises\n")
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    return ("--config-dir", str(folder)), {"PYTHONPATH": path}


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """What a line is refused with; in this process, for speed."""
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)

    def refused(*arguments: str) -> str:
        assert main(arguments) == 2
        seen = capsys.readouterr()
        assert seen.out == ""
        assert "Traceback" not in seen.err
        return seen.err

    yield refused
    signal.signal(signal.SIGTERM, before)
    assert not (tmp_path / "runs").exists()


# --- what is typed ---
@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("+opt=ampp", ("no switch 'ampp'", "mean amp?", "tf32")),
        ("+opt=[amp,tf33]", ("no switch 'tf33'", "mean tf32?")),
        ("try ampp", ("no switch 'ampp'", "mean amp?")),
        ("-m +opt=amp,tf33", ("no switch 'tf33'", "mean tf32?")),
        ("recipe=digitz", ("no recipe 'digitz'", "mean digits?", "photos")),
        ("recipe.bach_size=3", ("no key 'recipe.bach_size'", "mean recipe.batch_size?", "recipe.steps")),
        ("recipee=digits", ("no key 'recipee'", "mean recipe?")),
        ("measure.proceses=1", ("no key 'measure.proceses'", "mean measure.processes?")),
        ("+opt=amp opt.amp.dtipe=float16", ("no key 'opt.amp.dtipe'", "mean opt.amp.dtype?")),
        ("opt=amp", ("+opt=amp",)),
        ("+opt=amp,tf32", ("key=[value1,value2]", "--multirun")),
        ("trie amp", ("'trie'", "mean 'try'?")),
        ("try", ("perftrain try amp",)),
        ("nothing", ("'nothing'", "verb")),
        ("runs nothing", ("'nothing'", "+opt=nothing")),
        ("--bugdet 5", ("'--bugdet'", "mean --budget?")),
        ("--budget", ("--budget needs a value",)),
        ("recipe=3", ("Quote a name",)),
        ("--budget x", ("number of seconds", "'x'", "--budget 60")),
        ("--budget 0", ("1 or more", "'0'")),
        ("--budget inf", ("'inf'",)),
        ("--budget nan", ("'nan'",)),
        ("--json nowhere/out.json", ("existing folder", "'nowhere'", "mkdir -p nowhere")),
        ("--config-dir nowhere", ("'nowhere'", "--config-dir")),
        ("-m measure.seed=1,2", ("needs switches", "+opt=amp,tf32")),
        ("recipe.batch_size=abc", ("recipe.batch_size", "'abc'", "Integer")),
        ("recipe.batch_size=-1", ("recipe.batch_size", "-1", "1 or more")),
        ("+opt=amp opt.amp.dtype=foo", ("bfloat16, float16", "'foo'", "opt.amp.dtype=bfloat16")),
        ("+opt=workers opt.workers.num_workers=-1", ("0 or more", "-1", "opt.workers.num_workers=2")),
        ("measure.budget_s=x", ("measure.budget_s", "'x'", "Float")),
        ("measure.processes=0", ("measure.processes", "1 or more", "was 0")),
        ("+opts=amp", ("'opts'", "Did you mean opt?")),
        ("~recipe", ("recipe cannot be left out", "recipe=")),
        ("+opt=[[amp]]", ("flat", "+opt=[amp,channels_last]")),
        ("recipe.batch_size=${oops}", ("'oops' not found",)),
        ("+opt=[accumulation,optimizer_in_backward]", ("accumulation", "optimizer_in_backward")),
        ("device=tpu", ("'tpu'", "device=auto")),
        ("recipe._target_=nowhere.Recipe", ("nowhere.Recipe", "PYTHONPATH")),
        ("recipe=photos recipe.batch_size=abc", ("recipe.batch_size", "'abc'")),
        ("recipe=photos recipe.data.on_error=foo", ("stop, skip", "'foo'")),
        ("recipe=photos recipe.data.root=/nonexistent", ("/nonexistent is not a folder", "recipe.data.root=")),
    ],
)
def test_a_mistake_is_named_with_what_to_type(said: Callable[..., str], line: str, parts: Sequence[str]) -> None:
    words = line.split()
    recipe = [] if any(w.startswith(("recipe=", "recipee=")) for w in words) else ["recipe=digits"]
    if words[0] in ("nothing", "runs", "trie", "try"):
        recipe = []
    message = said(*recipe, *words)
    for part in parts:
        assert part in message


def test_a_mistake_in_a_process_of_its_own(cli: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    told = cli("+opt=ampp", "recipe=digits")
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr.startswith("perftrain: There is no switch 'ampp'.")


def test_a_folder_without_images(said: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "pictures" / "cats").mkdir(parents=True)
    message = said("recipe=photos", f"recipe.data.root={tmp_path / 'pictures'}")
    assert all(part in message for part in ("Every class folder needs an image", "cats", "recipe.data.root="))


# --- files ---
@pytest.mark.slow
@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_truncated_photo_stops_or_is_skipped_and_counted(tmp_path: Path, on_error: str) -> None:
    rng = np.random.default_rng(0)
    for part, count in (("train", 8), ("val", 2)):
        for label in ("cat", "dog"):
            folder = tmp_path / "photos" / part / label
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 255, (40, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.jpg", quality=90)
    broken = tmp_path / "photos" / "train" / "cat" / "3.jpg"
    broken.write_bytes(broken.read_bytes()[:400])
    told = run_cli(
        "recipe=photos", "recipe.side=32", "recipe.batch_size=4", "recipe.steps=8", "measure.parity_steps=4",
        "measure.parity_seeds=1",
        f"recipe.data.root={tmp_path / 'photos'}", f"recipe.data.on_error={on_error}", "--json", "out.json", cwd=tmp_path,
    )  # fmt: skip
    if on_error == "stop":
        assert told.returncode == 1
        assert str(broken) in told.stderr
        assert "on_error=skip" in told.stderr
    else:
        assert told.returncode == 0, told.stderr
        assert str(broken) in told.stderr
        metrics = json.loads((tmp_path / "out.json").read_text())["run"]["metrics"]
        assert 1.0 in [v for name, v in metrics.items() if "skipped" in name or "unreadable" in name]


# --- programs ---
@pytest.mark.slow
def test_switches_that_break_the_program_get_their_verdict(mine: Any, tmp_path: Path) -> None:
    flags, env = mine
    told = run_cli(*SMALL, *flags, "-m", "+opt=no_number,memory,killed", "--budget", "3", "--json", "out.json", cwd=tmp_path, env=env)
    assert told.returncode == 0, told.stderr
    found = json.loads((tmp_path / "out.json").read_text())["verdicts"]
    assert [v["decision"] for v in found] == ["changes_result", "does_not_run", "does_not_run"]
    assert "must stay finite; it was nan" in found[0]["reason"]
    reasons = " ".join(v["reason"] for v in found[1:])
    assert "no room for the batch" in reasons
    assert "SIGKILL" in reasons


@pytest.mark.slow
@pytest.mark.parametrize(("how", "parts"), [
    ("raises", ("Traceback (most recent call last)", "the_users_own_function(output", "my_module.py", "own mistake: (64, 10)")),
    ("no_number", ("must stay finite", "it was nan")),
])  # fmt: skip
def test_a_program_that_fails_by_itself_is_exit_code_1(mine: Any, tmp_path: Path, how: str, parts: Sequence[str]) -> None:
    flags, env = mine
    told = run_cli("recipe=mine", f"recipe.how={how}", *SMALL[1:], *flags, cwd=tmp_path, env=env)
    assert told.returncode == 1, told.stderr
    for part in parts:
        assert part in told.stderr
    assert "failed without any switch" in told.stderr
    assert not [f for f in tmp_path.glob("runs/baseline-*") if "failed" not in f.name]


# --- signals ---
@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_training_keeps_what_it_measured(
    mine: Any, start: Callable[..., subprocess.Popen[str]], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    flags, env = mine
    process = start("recipe=mine", "recipe.how=slow", *SMALL[1:], "recipe.steps=2000", *flags, env=env)
    assert process.stdout is not None
    printed = []
    while "Baseline: training" not in (line := process.stdout.readline()):
        assert line, "".join(printed)
        printed.append(line)
    time.sleep(1.5)
    family = descendants(process.pid)
    assert family
    process.send_signal(number)
    said = process.stdout.read()
    assert process.wait(15) == code, said
    assert not alive(family)
    (folder,) = tmp_path.glob("runs/baseline-*-interrupted-*")
    run = json.loads((folder / "run.json").read_text())["run"]
    assert run["status"] == "interrupted"
    assert 5 <= len((folder / "steps.csv").read_text().splitlines()) < 500
    assert "are kept in" in said


# --- the runs folder ---
@pytest.mark.slow
def test_two_processes_that_need_one_baseline_record_it_once(tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    both = [start(*SMALL, "--json", f"{number}.json") for number in range(2)]
    said = [process.communicate(timeout=90)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert len(list(tmp_path.glob("runs/baseline-*"))) == 1
    assert sorted("Baseline recorded" in text for text in said) == [False, True]
    first, second = (json.loads((tmp_path / f"{number}.json").read_text())["run"] for number in range(2))
    assert first == second

    # the same folder, written by a later version
    (folder,) = tmp_path.glob("runs/baseline-*")
    newer = json.loads((folder / "run.json").read_text())
    newer["schema"] = 99
    (folder / "run.json").write_text(json.dumps(newer))
    told = run_cli(*SMALL, cwd=tmp_path)
    assert told.returncode == 2
    assert "schema 99" in told.stderr
    assert "--runs DIR" in told.stderr
    assert "training" not in told.stderr
    listed = run_cli("runs", cwd=tmp_path)
    assert listed.returncode == 0
    assert "schema 99" in listed.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounting a tiny file system needs root")
def test_a_full_disk(tmp_path: Path) -> None:
    small_disk = tmp_path / "disk"
    small_disk.mkdir()
    mount = shutil.which("mount")
    made = mount and subprocess.run([mount, "-t", "tmpfs", "-o", "size=8k", "tmpfs", small_disk], capture_output=True)
    if not made or made.returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        told = run_cli(*SMALL, "--runs", str(small_disk / "runs"), cwd=tmp_path)
        assert told.returncode == 2, told.stderr
        assert "No space left on device" in told.stderr
        assert "--runs DIR" in told.stderr
        assert not list(small_disk.glob("runs/baseline-*"))
        assert not list(small_disk.glob("runs/.saving-*"))
    finally:
        subprocess.run(["umount", small_disk], check=True)
