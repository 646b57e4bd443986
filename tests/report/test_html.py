"""The page: complete, self-contained, escaped; rendered by a real browser where there is one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from perftrain.facts import (
    Bottleneck,
    Cause,
    Decision,
    Diagnosis,
    Evidence,
    Numerics,
    Parity,
    PerftrainError,
    StepBreakdown,
    StepRow,
    Try,
    Verdict,
)
from perftrain.report.html import page_of
from perftrain.report.jsonfile import diagnosis_json, verdict_json
from perftrain.report.markdown import tune_markdown

NASTY = "<script>alert('x')</script>"
STEP = StepBreakdown({"data_wait": 0.08, "forward": 0.06, "backward": 0.05, "communication": 0.01}, 40, 640)
CAUSE = Cause(
    Bottleneck.INPUT_STORAGE,
    0.4,
    1.9,
    0.9,
    (Evidence(f"waits {NASTY}"),),
    "train.py:12",
    (Try((1.6, 1.9), "it overlaps", switch="workers"),),
)
DIAGNOSIS = Diagnosis(STEP, (CAUSE,), False, "Training waits for storage.")
VERDICT = Verdict(
    ("workers",),
    Decision.FASTER,
    "the interval lies above 1",
    1.9,
    (1.8, 2.0),
    0.02,
    12,
    5,
    Parity(Numerics.CLOSE, True, 30, 0.0, 0.0, "equal"),
)
TUNE = {
    "speedup": 1.9, "ci95": [1.8, 2.0], "kept": ["workers"], "rejected": [], "untried": [{"switch": "amp", "reason": NASTY}],
    "seconds": 200.0,
    "ledger": [{"switch": "workers", "predicted": [1.6, 2.0], "measured": 1.9, "ci95": [1.8, 2.0], "kept": True, "reason": "faster"},
               {"switch": "fused", "predicted": [1.0, 1.1], "measured": None, "ci95": None, "kept": False, "reason": "does not run"}],
    "next_bottleneck": "compute.saturated", "edits": ["shrink the files"],
    "program": f"train.py {NASTY}", "again": "perftrain tune train.py",
    "before": diagnosis_json(DIAGNOSIS), "after": diagnosis_json(DIAGNOSIS),
}  # fmt: skip
FACTS: dict[str, dict[str, Any]] = {
    "tune": {"tune": TUNE},
    "verdict": {"verdict": verdict_json(VERDICT)},
    "sweep": {"verdicts": [verdict_json(VERDICT)]},
    "diagnosis": {"diagnosis": {**diagnosis_json(DIAGNOSIS), "program": ["train.py"], "probes": []}},
}


class Links(HTMLParser):
    """Everything that a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "action", "data")]
        if tag not in ("meta", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("kind", FACTS)
def test_it_loads_nothing_and_escapes_everything(kind: str) -> None:
    page = page_of(FACTS[kind], "1.0")
    links = Links()
    links.feed(page)
    assert links.found == []
    assert links.open == []
    assert "<script" not in page
    assert "url(" not in page
    assert "@import" not in page
    assert len(page) < 3_000_000
    if kind in ("tune", "diagnosis"):
        assert "&lt;script&gt;" in page


def test_the_answer_comes_first() -> None:
    page = page_of(FACTS["tune"], "1.0")
    assert re.search(r'class="answer good">1\.9\S* .*faster with workers', page)
    for said in ("shrink the files", "compute.saturated", "perftrain tune train.py", "1.60", "train.py:12"):
        assert said in page, said


def test_thousands_of_steps_stay_small() -> None:
    rows = [StepRow(i, {"forward": 0.01 + 0.001 * (i % 7), "rest": 0.05 if i == 500 else 0.0}, 16) for i in range(20_000)]
    page = page_of(FACTS["verdict"], "1.0", rows)
    assert len(page) < 1_000_000
    assert "step 500: 63.0 ms" in page


def test_nothing_to_show() -> None:
    with pytest.raises(PerftrainError, match="A report is made of"):
        page_of({"schema": 1, "opts": []}, "1.0")


def test_tuning_as_markdown() -> None:
    text = tune_markdown(TUNE)
    assert text.startswith("## 1.9")
    assert "| workers |" in text
    assert "shrink the files" in text


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("kind", FACTS)
def test_a_browser_renders_it_without_errors(kind: str, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    (tmp_path / "page.html").write_text(page_of(FACTS[kind], "1.0"))
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--enable-logging=stderr",
        "--v=0",
    ]
    command = [CHROMIUM, *flags, f"--user-data-dir={tmp_path}/profile", "--dump-dom", f"file://{tmp_path}/page.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert 'class="answer' in done.stdout
    assert "CONSOLE" not in done.stderr
    json.dumps(done.stdout)
