"""Switches on a script that knows nothing of them."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from perftrain.compare.duet import Protocol
from perftrain.compare.script import NotFromOutside, ScriptFailed, sort_switches, try_on_script
from perftrain.facts import Decision, PerftrainError
from perftrain.opt import all_switches

QUICK = Protocol(budget_s=6.0, processes=2, block_s=0.05)
SCRIPT = """
import gc, time, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
torch.manual_seed(0)
torch.set_num_threads(1)
class Slow(Dataset):
    def __len__(self): return 4096
    def __getitem__(self, i):
        time.sleep(0.001)
        return torch.full((8,), i / 4096), torch.tensor([i / 4096])
if __name__ == "__main__":
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ballast = [[i] for i in range(200_000)]
    for x, y in DataLoader(Slow(), batch_size=8, shuffle=True):
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        gc.collect()
"""


@pytest.fixture
def script(tmp_path: Path) -> list[str]:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return [str(path)]


def judged(script: list[str], *switches: str):
    return try_on_script(script, sort_switches(switches, 2), QUICK, lambda what, spent, may: None)


@pytest.mark.slow
def test_what_takes_turns(script: list[str]) -> None:
    verdict = judged(script, "no_gc")
    assert verdict.decision is Decision.FASTER, verdict
    assert verdict.speedup is not None
    assert verdict.speedup > 1.5
    assert verdict.parity is not None
    assert verdict.parity.holds
    assert verdict.parity.distance == 0
    assert verdict.processes == 2


@pytest.mark.slow
def test_what_needs_whole_runs(script: list[str]) -> None:
    verdict = judged(script, "workers=4", "no_gc")
    assert verdict.decision is Decision.FASTER, verdict
    assert verdict.baseline is not None
    assert verdict.variant is not None
    assert verdict.variant.breakdown.phase_s["data_wait"] < 0.6 * verdict.baseline.breakdown.phase_s["data_wait"]


@pytest.mark.slow
def test_a_bundle_changes_the_result_or_not_by_its_losses(tmp_path: Path, script: list[str]) -> None:
    broken = (
        Path(script[0])
        .read_text()
        .replace("gc.collect()", "lr = 0.01 if gc.isenabled() else 1.0\n        optimizer.param_groups[0]['lr'] = lr")
    )
    Path(script[0]).write_text(broken)
    verdict = judged(script, "no_gc")
    assert verdict.decision is Decision.CHANGES_RESULT, verdict


def test_a_script_that_fails_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import torch\nraise SystemExit('no data')\n")
    with pytest.raises(ScriptFailed, match="exit code 1"):
        try_on_script([str(path)], sort_switches(["amp"], 2), replace(QUICK), lambda what, spent, may: None)


@pytest.mark.parametrize(
    ("word", "said"),
    [("ampp", "no switch 'ampp'"), ("dali", "puts another loader in the place"), ("workers=x", "whole number"), ("amp=2", "whole number")],
)
def test_what_is_refused(word: str, said: str) -> None:
    with pytest.raises(PerftrainError, match=said):
        sort_switches([word], 2)


def test_what_is_asked_adds_up() -> None:
    both = sort_switches(["workers=3", "amp"], 2).with_(sort_switches(["threads=1", "huge_pages"], 2))
    assert both.names == ("workers", "amp", "threads", "huge_pages")
    assert both.loader["num_workers"] == 3
    assert (both.arms, both.threads, both.whole_runs) == (("amp",), 1, True)
    assert "GLIBC_TUNABLES" in both.environment


def test_settings_of_the_process_take_turns_like_any_other_arm() -> None:
    from perftrain.attach.probes import SETTINGS

    for name in SETTINGS:
        assert not all_switches()[name]().environment(), f"{name} needs its variables before torch starts"
        assert sort_switches([name], 2).arms == (name,)
    assert sort_switches(["in_order"], 2).loader == {"in_order": False}


def test_a_switch_that_needs_an_edit_says_why() -> None:
    with pytest.raises(NotFromOutside, match="decode_cache cannot be put into a script from outside: it changes how the dataset"):
        sort_switches(["decode_cache"], 2)


@pytest.mark.slow
def test_a_setting_reaches_the_program_in_its_turns_only(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        SCRIPT.replace("gc.collect()", f"open({str(tmp_path / 'seen')!r}, 'a').write(str(torch.are_deterministic_algorithms_enabled())[0])")
    )
    verdict = judged([str(path)], "deterministic")
    seen = (tmp_path / "seen").read_text()
    assert verdict.decision not in (Decision.DOES_NOT_RUN, Decision.CHANGES_RESULT), verdict.reason
    assert "TF" in seen
    assert "FT" in seen


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="cuDNN is there")
def test_a_setting_that_cannot_act_here_does_not_run(script: list[str]) -> None:
    verdict = judged(script, "cudnn_benchmark")
    assert verdict.decision is Decision.DOES_NOT_RUN
    assert "CUDA" in verdict.reason or "cuda" in verdict.reason
