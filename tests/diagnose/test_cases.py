"""Scripts with one known fault each, diagnosed as a user would, on a short budget."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

CASES = Path(__file__).parent / "cases"
TRUTH = {t["file"]: t for t in yaml.safe_load((CASES / "truth.yaml").read_text())["cases"]}
LONG = {
    "channels_first.py", "frozen_backbone.py", "many_threads.py", "kept_graphs.py", "watched_gradients.py", "augment.py",
    "restart.py", "bookkeeping.py",
}  # fmt: skip
"""Need more than the least budget, have two faults of like size, or are much like another: the exam has them (benchmarks/exam)."""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(TRUTH) - LONG))
def test_the_fault_is_found(name: str, tmp_path: Path) -> None:
    out = tmp_path / "diagnosis.json"
    command = [sys.executable, "-m", "perftrain", "diagnose", "--json", str(out), "--budget", "20", str(CASES / name)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(out.read_text())["diagnosis"]
    truth = TRUTH[name]
    labels = [c["label"] for c in found["causes"]]
    assert found["healthy"] is truth["healthy"], labels
    assert labels[0] in {truth["cause"], *truth["also_ok"]}, found
    offered = {t["switch"] for c in found["causes"] for t in c["try"] if t.get("switch")}
    assert not offered & set(truth["wrong_cures"]), found
    assert re.fullmatch(truth.get("where", ".*"), found["causes"][0]["where"]), found
    if truth["switch"]:
        assert truth["switch"] in offered
    assert sum(found["breakdown"]["phase_s"].values()) == pytest.approx(found["breakdown"]["step_s"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["diagnosis.json"]


def test_every_case_has_its_truth() -> None:
    assert set(TRUTH) == {p.name for p in CASES.glob("*.py")}
