"""The command line as users type it, in processes of its own, on the small recipe."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SMALL, run_cli, wait_for

Told = subprocess.CompletedProcess[str]
Cli = Callable[..., Told]
DECISIONS = {"faster", "slower", "no_difference", "not_resolved", "changes_result", "does_not_run"}


@dataclass(frozen=True)
class Measured:
    """A runs folder that holds a baseline, and what recording it said."""

    runs: Path
    told: subprocess.CompletedProcess[str]
    json: dict[str, Any]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    folder = tmp_path_factory.mktemp("measured")
    told = run_cli(*SMALL, "+opt=nothing", "--budget", "15", "--json", "out.json", cwd=folder)
    assert told.returncode == 0, told.stderr
    return Measured(folder / "runs", told, json.loads((folder / "out.json").read_text()))


def in_the_same_runs(measured: Measured, *arguments: str, budget: int = 5) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    folder = measured.runs.parent
    out = folder / "again.json"
    out.unlink(missing_ok=True)
    told = run_cli(*arguments, "--budget", str(budget), "--json=again.json", cwd=folder)
    return told, json.loads(out.read_text()) if out.exists() else {}


def test_the_first_verdict_records_the_baseline(measured: Measured) -> None:
    assert "Baseline recorded: runs/baseline-digits-" in measured.told.stderr
    assert "nothing" in measured.told.stdout
    folders = [f.name for f in measured.runs.glob("baseline-*")]
    assert len(folders) == 1
    assert (measured.runs / folders[0] / "steps.csv").exists()


def test_the_json_has_the_documented_shape(measured: Measured) -> None:
    facts = measured.json
    assert facts.keys() == {"schema", "run", "diagnosis", "verdict"}
    assert facts["schema"] == 1
    verdict = facts["verdict"]
    assert verdict["switches"] == ["nothing"]
    assert verdict["decision"] in DECISIONS
    assert verdict.keys() >= {"speedup", "ci95", "resolution", "pairs", "parity", "baseline", "variant", "reason"}
    assert verdict["parity"].keys() >= {"class", "holds"}
    assert verdict["parity"]["class"] == "EXACT"
    assert verdict["parity"]["holds"] is True
    assert verdict["pairs"] >= 4, verdict["reason"]
    assert verdict["ci95"][0] <= verdict["speedup"] <= verdict["ci95"][1]
    assert verdict["resolution"] > 0
    assert verdict["again"].startswith("python -m perftrain recipe=digits")
    assert verdict["again"].endswith("+opt=nothing --budget 15")
    for arm in ("baseline", "variant"):
        assert verdict[arm]["breakdown"]["step_s"] > 0
        assert "data_wait_share" in verdict[arm]["breakdown"]
    diagnosis = facts["diagnosis"]
    assert diagnosis.keys() >= {"healthy", "breakdown", "causes"}
    for cause in diagnosis["causes"]:
        assert cause.keys() >= {"label", "share", "upper_bound", "confidence", "evidence", "where", "try", "avoid"}
        assert all(t.keys() >= {"switch", "predicted"} for t in cause["try"])


@pytest.mark.slow
def test_a_bundle_finds_the_baseline_and_does_not_train_it_again(measured: Measured) -> None:
    told, facts = in_the_same_runs(measured, *SMALL, "+opt=[amp,tf32]")
    assert told.returncode == 0, told.stderr
    assert "Baseline found" in told.stderr
    assert "Baseline: training" not in told.stderr
    assert facts["verdict"]["switches"] == ["amp", "tf32"]
    assert facts["run"]["started"] == measured.json["run"]["started"]
    assert "bundle" in told.stdout


@pytest.mark.slow
def test_the_verb_try_and_a_setting_of_a_switch(measured: Measured) -> None:
    told, facts = in_the_same_runs(measured, "try", "amp", *SMALL, "opt.amp.dtype=float16")
    assert told.returncode == 0, told.stderr
    assert "Baseline found" in told.stderr
    assert facts["verdict"]["settings"] == {"amp": {"dtype": "float16"}}


@pytest.mark.slow
def test_another_batch_size_is_another_baseline(measured: Measured) -> None:
    told, facts = in_the_same_runs(measured, *SMALL, "recipe.batch_size=32")
    assert told.returncode == 0, told.stderr
    assert "Baseline recorded" in told.stderr
    assert facts["run"]["fingerprint"] != measured.json["run"]["fingerprint"]
    assert facts.keys() == {"schema", "run", "diagnosis"}


@pytest.mark.slow
def test_a_killed_sweep_goes_on_and_a_failing_arm_stops_nobody(measured: Measured, start: Callable[..., subprocess.Popen[str]]) -> None:
    line = (*SMALL, "-m", "+opt=channels_last,tf32,nothing", "--budget", "6", "--runs", str(measured.runs))
    first = start(*line)
    wait_for(lambda: list(measured.runs.glob("sweeps/*/verdict-tf32-*.json")), 90, "the first measured verdict of the sweep")
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert not list(measured.runs.glob("sweeps/*/ranking.json"))

    told = run_cli(*line, "--json", "sweep.json", cwd=measured.runs.parent)
    assert told.returncode == 0, told.stderr
    assert "tf32: verdict reused" in told.stderr
    assert "nothing: verdict reused" not in told.stderr
    (folder,) = {f.parent for f in measured.runs.glob("sweeps/*/ranking.json")}
    ranking = json.loads((folder / "ranking.json").read_text())
    assert ranking == json.loads((measured.runs.parent / "sweep.json").read_text())
    assert ranking.keys() == {"schema", "verdicts"}
    assert (folder / "command.txt").read_text().startswith("python -m perftrain -m ")
    assert sorted(v["switches"][0] for v in ranking["verdicts"]) == ["channels_last", "nothing", "tf32"]
    assert ranking["verdicts"][-1]["switches"] == ["channels_last"]
    assert ranking["verdicts"][-1]["decision"] == "does_not_run"
    assert "has none" in ranking["verdicts"][-1]["reason"]
    markdown = (folder / "ranking.md").read_text()
    assert all(name in markdown.replace("\\", "") for name in ("channels_last", "nothing", "tf32"))


def test_runs_lists_what_is_recorded(measured: Measured) -> None:
    told, facts = in_the_same_runs(measured, "runs")
    assert told.returncode == 0, told.stderr
    assert measured.json["run"]["run_id"] in {r["run_id"] for r in facts["runs"]}
    assert "digits" in told.stdout


def test_opts_lists_every_switch(cli: Cli, tmp_path: Path) -> None:
    told = cli("opts", "--json", "opts.json")
    assert told.returncode == 0, told.stderr
    opts = json.loads((tmp_path / "opts.json").read_text())["opts"]
    assert {"amp", "nothing", "tf32", "workers"} <= {o["name"] for o in opts}
    for opt in opts:
        assert opt.keys() == {"name", "place", "relieves", "numerics", "runs_here", "reason", "summary"}
        assert opt["name"] in told.stdout
        assert opt["runs_here"] or opt["reason"]


def test_doctor_describes_the_machine(cli: Cli, tmp_path: Path) -> None:
    told = cli("doctor", "--json", "doctor.json", "device=cpu")
    assert told.returncode == 0, told.stderr
    doctor = json.loads((tmp_path / "doctor.json").read_text())["doctor"]
    assert doctor["machine"]["cores"] >= 1
    assert doctor["peaks"]["matmul"]["float32"]["seconds"] > 0
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("word", ["--help", "-h", "help"])
def test_help(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    from perftrain.cli import main

    assert main([word]) == 0
    said = capsys.readouterr().out
    assert all(part in said for part in ("+opt=amp", "--json", "--budget", "--runs", "Exit codes"))


def test_cfg_shows_the_configuration_and_measures_nothing(cli: Cli, tmp_path: Path, small: Sequence[str]) -> None:
    told = cli(*small, "+opt=amp", "--cfg", "job", "--budget", "7")
    assert told.returncode == 0, told.stderr
    assert "batch_size: 64" in told.stdout
    assert "budget_s: 7" in told.stdout
    assert "dtype: bfloat16" in told.stdout
    assert not (tmp_path / "runs").exists()
