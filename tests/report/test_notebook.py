"""What records look like in a notebook: a fragment that is escaped, closed and fits a dark page too."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from perftrain.facts import (
    ArmSummary,
    Avoid,
    Bottleneck,
    Cause,
    Decision,
    Diagnosis,
    Evidence,
    RunRecord,
    StepBreakdown,
    Try,
    Verdict,
)

NASTY = "<script>alert('x')</script>"
STEP = StepBreakdown({"data_wait": 0.08, "forward": 0.06, NASTY: 0.06}, 40, 640)
ARM = ArmSummary(STEP, 1 << 20, 0.1, "input.decode")
CAUSE = Cause(
    Bottleneck.INPUT_DECODE, 0.4, 1.6, 0.9, (Evidence(f"waits {NASTY}"),), "train.py:3",
    (Try((1.3, 1.6), "it overlaps", switch="workers"),), (Avoid("amp", NASTY),),
)  # fmt: skip
FAILED = RunRecord(
    "id", "failed", "library", {"name": NASTY}, "", {}, {}, {}, "2026", STEP, 0.1, 1 << 20, {"accuracy": 0.5}, reason="no luck"
)
RECORDS: dict[str, tuple[Any, list[str]]] = {
    "breakdown": (STEP, ["200 ms a step", "data wait 80.0 ms (40.0 %)"]),
    "run": (FAILED, ["FAILED: no luck", "80.0 samples/s", "accuracy", "1.00 MiB"]),
    "verdict": (Verdict(("workers",), Decision.FASTER, "", 1.5, (1.4, 1.6), 0.02, 12, 5, baseline=ARM, variant=ARM, notes=(NASTY,)),
                ["FASTER 1.50×", "33.3 % less time", "memory peak"]),
    "a verdict without numbers": (Verdict(("workers",), Decision.DOES_NOT_RUN, NASTY), ["DOES NOT RUN"]),
    "diagnosis": (Diagnosis(STEP, (CAUSE,), False, "Decoding rules."),
                  ["Decoding rules.", "input.decode", "Try workers (predicted 1.30–1.60×)", "amp"]),
}  # fmt: skip


class Balanced(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag != "script"
        assert not {name for name, _ in attrs} - {"style", "title"}
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("kind", RECORDS)
def test_a_fragment_says_it_all_and_stands_alone(kind: str) -> None:
    record, said = RECORDS[kind]
    fragment = record._repr_html_()
    page = Balanced()
    page.feed(fragment)
    assert page.open == []
    for words in said:
        assert words in page.text, words
    assert not re.search(r"[^-]color:(?!inherit)", fragment)  # letters are the notebook's own: white on black or black on white
    assert len(fragment) < 10_000
