"""``perftrain report`` of a run on disk: the page, the browser, the trace."""

from __future__ import annotations

import json
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from perftrain.facts import PerftrainError, RunRecord, StepBreakdown, StepRow
from perftrain.options import sort_out
from perftrain.report.perfetto import trace_of
from perftrain.reported import report_line
from perftrain.store import Store

ROWS = [
    StepRow(n, {"data_wait": 0.01 / 3, "forward": 0.02, "tea break": 0.001, "rest": 1e-9 * n}, 8, loss=1 / (n + 1), peak_bytes=n << 20)
    for n in range(40)
]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    now = StepBreakdown({"data_wait": 0.01 / 3, "forward": 0.02}, 40, 320)
    Store(tmp_path).save(RunRecord("one", "complete", "library", {}, "", {}, {}, {}, "2026-01-01", now, 0.1, None), ROWS)
    return tmp_path


def report(runs: Path, *words: str) -> int:
    return report_line(sort_out(["report", *words, "--runs", str(runs)]), None)


def test_open_shows_the_page_in_a_browser(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert report(runs, "one") == 0
    assert opened == []
    assert report(runs, "one", "--open") == 0
    assert opened == [(runs / "one" / "report.html").resolve().as_uri()]
    assert (runs / "one" / "report.html").read_text().startswith("<!doctype html>")


def test_the_page_of_a_baseline_says_how_to_do_it_again(runs: Path) -> None:
    data = {"_target_": "perftrain_recipes.photos.PhotoData", "root": "/my photos", "on_error": "stop"}
    recipe = {"_target_": "perftrain_recipes.photos.Photos", "batch_size": 32, "side": 96, "data": data}
    now = StepBreakdown({"forward": 0.02}, 40, 320)
    for name, node in (("shipped", recipe), ("own", {"_target_": "mine.Recipe", "x": 1})):
        Store(runs).save(RunRecord(name, "complete", "baseline", {"recipe": node}, "", {}, {}, {}, "2026-01-01", now, 0.1, None), ROWS)
        assert report(runs, name) == 0
    page = unescape((runs / "shipped" / "report.html").read_text())
    assert "python -m perftrain recipe=photos recipe.batch_size=32 'recipe.data.root=\"/my photos\"'" in page
    assert "python -m perftrain" not in (runs / "own" / "report.html").read_text()


@pytest.mark.parametrize("words", [["one", "--trace"], ["--trace", "one"], ["one", "--trace", "--open"]])
def test_a_trace_stands_beside_the_page(words: list[str], runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("webbrowser.open", lambda _: True)
    assert report(runs, *words) == 0
    assert json.loads((runs / "one" / "report-trace.json").read_text())["traceEvents"]
    assert (runs / "one" / "report.html").exists()


def test_a_trace_where_it_is_asked_for(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(runs, "one", "--trace", str(runs / "here.json")) == 0
    assert (runs / "here.json").exists()
    assert str(runs / "here.json") in capsys.readouterr().out


def test_a_trace_needs_steps(runs: Path) -> None:
    (runs / "facts.json").write_text('{"schema": 1, "verdicts": []}')
    with pytest.raises(PerftrainError, match="made of the steps of a recorded run"):
        report(runs, str(runs / "facts.json"), "--trace")
    assert not (runs / "facts.html").exists()


def test_the_slices_of_a_trace_add_up_to_the_steps() -> None:
    events: list[dict[str, Any]] = json.loads(trace_of("one", ROWS))["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert {(e["pid"], e["tid"]) for e in slices} == {(1, 1)}
    steps = [e for e in slices if e["name"].startswith("step ")]
    phases = [e for e in slices if e not in steps]
    assert [e["name"] for e in steps] == [f"step {n}" for n in range(40)]
    assert {e["name"] for e in phases} == {"data_wait", "forward", "tea break", "rest"}

    def edges_ns(event: dict[str, Any]) -> tuple[int, int]:
        return round(1000 * event["ts"]), round(1000 * (event["ts"] + event["dur"]))

    end_ns = 0
    for event, row in zip(steps, ROWS, strict=True):
        begin_ns, before_ns = edges_ns(event)[0], end_ns
        end_ns = edges_ns(event)[1]
        assert begin_ns == before_ns
        assert end_ns - begin_ns == pytest.approx(1e9 * row.step_s, abs=2)
        inner = [edges_ns(e) for e in phases if begin_ns <= edges_ns(e)[0] < end_ns]
        assert [begin_ns, *(end for _, end in inner)] == [*(begin for begin, _ in inner), end_ns]  # no gap, no overlap
    counters = [(e["name"], list(e["args"].values())) for e in events if e["ph"] == "C"]
    assert counters[:2] == [("loss", [1.0]), ("peak memory (bytes)", [0])]
