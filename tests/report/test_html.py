"""The page: complete, self-contained, escaped; rendered by a real browser where there is one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import pairwise
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
ROOFLINE = {
    "dtype": "float32", "flop": 1.2e9, "bytes": 3.4e8, "seconds": 0.05, "mfu": 0.31,
    "peaks": {"flop": {"float32": {"amount": 8e9, "seconds": 0.1}, "bfloat16": {"amount": 5e10, "seconds": 0.1}},
              "memory": {"amount": 2e9, "seconds": 0.1}},
}  # fmt: skip
MEMORY = {
    "weights_bytes": 44_000_000, "gradients_bytes": 44_000_000, "optimizer_bytes": 88_000_000, "process_bytes": 950_000_000,
    "activations_and_workspace_bytes": 120_000_000, "growth_bytes_per_step": 200_000,
    "timeline": [[0.08 + 0.0001 * i, 1e6 * min(i, 120, 1100 - i)] for i in range(1101)],
    "phases": [["data_wait", 0.0, 0.08], ["forward", 0.08, 0.14], ["backward", 0.14, 0.189], ["optimizer", 0.189, 0.19]],
}  # fmt: skip
TUNE = {
    "speedup": 1.9, "ci95": [1.8, 2.0], "kept": ["workers", "amp"], "rejected": [{"switch": "fused", "reason": "the optimizer cannot"}],
    "untried": [{"switch": "amp", "reason": NASTY}],
    "seconds": 200.0, "place": "cpu",
    "ledger": [{"switch": "workers", "predicted": [1.6, 2.0], "measured": 1.9, "ci95": [1.8, 2.0], "kept": True, "reason": "faster"},
               {"switch": "amp", "predicted": [1.0, 1.4], "measured": 1.2, "ci95": [1.15, 1.25], "kept": True, "reason": "faster"},
               {"switch": "fused", "predicted": [1.0, 1.1], "measured": None, "ci95": None, "kept": False, "reason": "does not run"}],
    "next_bottleneck": "compute.saturated", "edits": ["shrink the files"],
    "program": f"train.py {NASTY}", "again": "perftrain tune train.py",
    "before": {**diagnosis_json(DIAGNOSIS), "roofline": ROOFLINE, "memory": MEMORY},
    "after": {**diagnosis_json(DIAGNOSIS), "roofline": {**ROOFLINE, "dtype": "bfloat16", "seconds": 0.03, "mfu": 0.1}, "memory": MEMORY},
}  # fmt: skip
FACTS: dict[str, dict[str, Any]] = {
    "tune": {"tune": TUNE},
    "verdict": {"verdict": {**verdict_json(VERDICT), "again": "python -m perftrain +opt=amp"}},
    "sweep": {"verdicts": [verdict_json(VERDICT)]},
    "diagnosis": {
        "diagnosis": {**diagnosis_json(DIAGNOSIS), "program": ["train.py", NASTY], "probes": [], "roofline": ROOFLINE, "memory": MEMORY}
    },
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
    for said in ("shrink the files", "compute.saturated", "perftrain tune train.py", "1.60", "train.py:12", "the optimizer cannot"):
        assert said in page, said


def test_a_verdict_says_how_to_do_it_again() -> None:
    assert "<pre>python -m perftrain +opt=amp</pre>" in page_of(FACTS["verdict"], "1.0")
    assert "How to do it again" not in page_of(FACTS["sweep"], "1.0")


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


# --- drawings ---
def shapes(page: str, title: str) -> str:
    """The drawing below ``title``."""
    return page.split(f"<h2>{title}</h2>")[1].split("</svg>")[0]


def test_the_roofline_has_its_roofs_and_the_program_below_them() -> None:
    page = page_of(FACTS["diagnosis"], "1.0")
    assert "31.0 % of the float32 peak that was measured here (MFU)" in page
    assert "34.0 % of what memory allows at 3.53 FLOP/B" in page  # 24 GFLOP/s of 3.53 × 20 GB/s
    drawing = shapes(page, "Roofline")
    slope = re.search(r'<line x1="([\d.]+)" y1="([\d.]+)" x2="([\d.]+)" y2="([\d.]+)"[^>]*><title>memory: 20.0 GB/s', drawing)
    roof = re.search(r'<line x1="([\d.]+)" y1="([\d.]+)" x2="([\d.]+)" y2="([\d.]+)"[^>]*><title>bfloat16: 500 GFLOP/s', drawing)
    dot = re.search(r'<circle cx="([\d.]+)" cy="([\d.]+)"', drawing)
    assert slope
    assert roof
    assert dot
    x1, y1, x2, y2 = map(float, slope.groups())
    assert (x2, y2) == pytest.approx(tuple(map(float, roof.groups()[:2])), abs=0.2)  # they meet at the ridge
    x, y = map(float, dot.groups())
    assert y > y1 + (y2 - y1) * (x - x1) / (x2 - x1)  # below the slope: y grows downwards


def test_memory_is_stacked_and_its_peak_is_marked() -> None:
    page = page_of(FACTS["diagnosis"], "1.0")
    drawing = shapes(page, "Memory in one step")
    assert f"peak {(176e6 + 120e6) / 2**20:.0f} MiB" in drawing
    for said in ("weights 42.0 MiB", "backward: 49.0 ms", "activations and workspace"):
        assert said in drawing, said
    assert "grows by 195 KiB a step" in page
    boxes = [
        tuple(map(float, b))
        for b in re.findall(r'<rect x="78.0" y="([\d.]+)" width="[\d.]+" height="([\d.]+)" fill="#\w+" fill-opacity="0.85"', drawing)
    ]
    assert len(boxes) == 3
    for (top, _), (above, tall) in pairwise(boxes):
        assert above + tall == pytest.approx(top, abs=0.2)


def test_what_was_not_measured_is_not_drawn() -> None:
    bare = {**FACTS["diagnosis"]["diagnosis"], "roofline": {**ROOFLINE, "peaks": {}}, "memory": {"weights_bytes": 1}}
    page = page_of({"diagnosis": bare}, "1.0")
    assert "Roofline" not in page
    assert "Memory in one step" not in page


def test_a_long_memory_timeline_keeps_its_peak() -> None:
    long = {"timeline": [[i * 1e-6, 10_000.0 + (5e8 if i == 77_777 else 0)] for i in range(100_000)]}
    page = page_of({"diagnosis": {**FACTS["diagnosis"]["diagnosis"], "memory": long}}, "1.0")
    assert "peak 477 MiB" in page
    assert len(page) < 300_000


def test_the_waterfall_falls_to_what_the_bundle_measured() -> None:
    drawing = shapes(page_of(FACTS["tune"], "1.0"), "From the step as it was to the step now")
    told = re.findall(r'text-anchor="start">([^<]+)</text>', drawing)
    assert told[:2] == ["as it was", "200 ms"]
    assert told[3].startswith("105 ms, 1.90×")
    assert told[5].startswith("87.7 ms, 2.28×")  # 1.9 × 1.2
    assert told[7].startswith("105 ms, 1.90× [1.80, 2.00]")


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
