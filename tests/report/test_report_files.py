"""What is written: Markdown that keeps its shape, JSON that is strict and comes back the same."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_report_words import CLOSE, DIAGNOSIS, EVERY, HEADLINES, RECORD, SLOW, verdict

from perftrain.facts import Decision, PerftrainError, run_record_from
from perftrain.report import jsonfile, markdown


@pytest.mark.parametrize("decision", list(Decision))
def test_markdown_has_the_decision_as_heading(decision: Decision) -> None:
    heading = markdown.verdict_markdown(EVERY[decision]).splitlines()[0].replace("\\", "")
    assert heading == f"## {EVERY[decision].switches[0]}: {HEADLINES[decision]}"


def test_markdown_tables_keep_their_shape() -> None:
    text = markdown.run_markdown(RECORD, DIAGNOSIS) + markdown.verdict_markdown(verdict(Decision.FASTER, "a|b"))
    assert r"draft mode \| PIL" in text
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in block.splitlines()}) == 1
    assert markdown.ranking_markdown(EVERY.values()).count("\n") == 8


def strict(obj: Any) -> Any:
    def refuse(constant: str) -> Any:
        raise AssertionError(constant)

    return json.loads(json.dumps(obj), parse_constant=refuse)


@pytest.mark.parametrize("decision", list(Decision))
def test_a_verdict_survives_json(decision: Decision) -> None:
    raw = strict(jsonfile.verdict_json(EVERY[decision]))
    assert raw["decision"] == decision.value
    assert jsonfile.verdict_from_json({**raw, "of_a_later_version": 1}) == EVERY[decision]


def test_json_has_the_documented_shape() -> None:
    raw = strict(jsonfile.verdict_json(EVERY[Decision.FASTER]))
    assert raw["switches"] == ["amp"]
    assert raw["ci95"] == [1.80, 1.89]
    assert raw["parity"]["class"] == "CLOSE"
    assert raw["baseline"]["breakdown"]["data_wait_share"] == pytest.approx(0.38, abs=0.01)
    found = strict(jsonfile.diagnosis_json(DIAGNOSIS))
    assert found["breakdown"]["data_wait_share"] == pytest.approx(0.38, abs=0.01)
    cause = found["causes"][0]
    assert cause["try"][0] == {"switch": "workers", "predicted": [1.3, 1.6], "because": "4 workers [bold]decode"}
    assert cause["try"][1]["edit"] == "draft mode | PIL"
    assert cause["avoid"] == [{"switch": "amp", "because": "computing is not what it waits for"}]
    assert cause["evidence"] == ["the queue was empty [at] 96 % of the steps (train.py:57)"]


def test_json_is_strict() -> None:
    broken = replace(CLOSE, distance=math.inf, holds=False)
    odd = verdict(Decision.CHANGES_RESULT, parity=broken, break_even_steps=math.inf, settings={"amp": {"at": Path("x"), "r": math.nan}})
    raw = strict(jsonfile.verdict_json(odd))
    assert raw["parity"]["distance"] is None
    assert raw["break_even_steps"] is None
    assert raw["settings"] == {"amp": {"at": "x", "r": None}}
    parity = jsonfile.verdict_from_json(raw).parity
    assert parity
    assert math.isnan(parity.distance)
    run = strict(jsonfile.run_json(RECORD))
    assert run["metrics"]["loss"] is None
    assert run_record_from(run).breakdown == SLOW


def test_write_json_replaces_at_once_or_says_why_not(tmp_path: Path) -> None:
    target = tmp_path / "verdict.json"
    jsonfile.write_json(target, {"old": 1})
    jsonfile.write_json(target, {"schema": 1, "x": math.nan})
    assert json.loads(target.read_text()) == {"schema": 1, "x": None}
    assert list(tmp_path.iterdir()) == [target]
    with pytest.raises(PerftrainError, match="mkdir -p"):
        jsonfile.write_json(tmp_path / "missing" / "x.json", {})
    with pytest.raises(PerftrainError, match="is a folder"):
        jsonfile.write_json(tmp_path, {})


def test_a_link_or_a_pipe_is_written_to_not_replaced(tmp_path: Path) -> None:
    link, behind = tmp_path / "link", tmp_path / "behind"
    link.symlink_to(behind)
    jsonfile.write_json(link, [1])
    assert link.is_symlink()
    assert json.loads(behind.read_text()) == [1]
