"""What a verdict says in words; and the hand-made facts that all tests of the report share."""

import math
from dataclasses import replace
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
    Numerics,
    Parity,
    RunRecord,
    StepBreakdown,
    Try,
    Verdict,
    ranked,
)
from perftrain.report import run_words, words

SLOW = StepBreakdown({"data_wait": 0.070, "copy": 0.004, "forward": 0.04, "backward": 0.06, "my_phase": 0.008, "rest": 0.002}, 120, 7680)
FAST = StepBreakdown({"data_wait": 0.002, "copy": 0.004, "forward": 0.04, "backward": 0.05, "my_phase": 0.004, "rest": 0.0}, 120, 7680)
BASELINE = ArmSummary(SLOW, 3 * 2**30, 2.3, "input.decode", 0.41)
VARIANT = ArmSummary(FAST, 4 * 2**30, 14.2, "compute.layout", 0.42)
CLOSE = Parity(Numerics.CLOSE, True, 100, 0.0021, 0.0105, "rms 0.0021")
DIAGNOSIS = Diagnosis(
    SLOW,
    (
        Cause(
            Bottleneck.INPUT_DECODE,
            0.38,
            1.61,
            0.9,
            (Evidence("the queue was empty [at] 96 % of the steps", "train.py:57"),),
            "train.py:57",
            (Try((1.3, 1.6), "4 workers [bold]decode", "workers"), Try((1.1, 1.2), "less to decode", edit="draft mode | PIL")),
            (Avoid("amp", "computing is not what it waits for"),),
        ),
        Cause(Bottleneck.COMPUTE_LAYOUT, 0.2, 1.1, 0.5, ()),
    ),
    False,
    "38 % of each step waits for decoding.",
)
RECORD = RunRecord(
    run_id="20260102-a1b2",
    status="complete",
    role="baseline",
    workload={"name": "photos", "batch_size": 64, "data": {"folder": "x"}},
    fingerprint="f00d",
    settings={"workers": {"num_workers": 4}},
    environment={"software": {"torch": "2.11.0"}},
    machine={"cpu": "Xeon", "memory_bytes": 2**33, "gpu": None, "peaks": {}},
    started="2026-01-02T03:04:05+00:00",
    breakdown=SLOW,
    warmup_s=2.3,
    peak_bytes=None,
    metrics={"accuracy": 0.912, "loss": math.nan},
)


def verdict(decision: Decision, name: str = "amp", **changes: Any) -> Verdict:
    usual = Verdict(
        switches=(name,),
        decision=decision,
        reason="",
        speedup=1.84,
        ci95=(1.80, 1.89),
        resolution=0.014,
        pairs=24,
        processes=2,
        parity=CLOSE,
        baseline=BASELINE,
        variant=VARIANT,
        break_even_steps=119.2,
        seconds=84.0,
        notes=("both on huge pages",),
        fingerprint="f00d",
        settings={name: {"dtype": "bfloat16"}},
    )
    return replace(usual, **changes)


EVERY = {
    Decision.FASTER: verdict(Decision.FASTER),
    Decision.SLOWER: verdict(Decision.SLOWER, "tf32", speedup=0.97, ci95=(0.95, 0.99), break_even_steps=None),
    Decision.NO_DIFFERENCE: verdict(Decision.NO_DIFFERENCE, "fused", speedup=1.003, ci95=(0.995, 1.011)),
    Decision.NOT_RESOLVED: verdict(Decision.NOT_RESOLVED, "pin", speedup=1.04, ci95=(0.9, 1.2), reason="too much scatter"),
    Decision.CHANGES_RESULT: verdict(
        Decision.CHANGES_RESULT, "zero", reason="losses part at step 40", parity=replace(CLOSE, holds=False, distance=0.09)
    ),
    Decision.DOES_NOT_RUN: Verdict(("dali",), Decision.DOES_NOT_RUN, "dali [red]is[/red] not here [/]\x1b[31m. Type: pip install x"),
}
HEADLINES = {
    Decision.FASTER: "FASTER 1.84× [1.80, 1.89]",
    Decision.SLOWER: "SLOWER 0.97× [0.95, 0.99]: 3.0 % slower",
    Decision.NO_DIFFERENCE: "NO DIFFERENCE: anything over 1.4 % would have been seen",
    Decision.NOT_RESOLVED: "NOT RESOLVED: too much scatter",
    Decision.CHANGES_RESULT: "CHANGES THE RESULT: losses part at step 40",
    Decision.DOES_NOT_RUN: "DOES NOT RUN: dali [red]is[/red] not here [/]. Type: pip install x",
}


@pytest.mark.parametrize("decision", list(Decision))
def test_the_decision_in_words(decision: Decision) -> None:
    assert words.headline(EVERY[decision]) == HEADLINES[decision]
    assert words.headline(Verdict(("bare",), decision, "")).startswith(words.DECISION_WORDS[decision].upper())


def test_best_first() -> None:
    better = verdict(Decision.FASTER, "wide", speedup=1.9, ci95=(1.7, 2.1))
    best_first = ranked([*reversed(EVERY.values()), better])
    assert [v.switches[0] for v in best_first] == ["amp", "wide", "fused", "pin", "tf32", "zero", "dali"]


@pytest.mark.parametrize(
    ("parity", "told"),
    [
        (None, "not compared"),
        (replace(CLOSE, steps=0, detail="the script sets no seed"), "the script sets no seed"),
        (
            CLOSE,
            "the same (CLOSE): over 100 steps the losses differ by 0.00210, within the 0.0105 between the baseline's own seeds",
        ),
        (
            replace(CLOSE, holds=False, distance=0.021),
            "NOT the same (CLOSE): over 100 steps the losses differ by 0.0210, 2.00 times the",
        ),
        (replace(CLOSE, holds=False, distance=math.inf, detail="became NaN"), "NOT the same (CLOSE): over 100 steps became NaN"),
        (Parity(Numerics.EXACT, True, 9, 0.0, 0.1, ""), "the same (EXACT): over 9 steps the losses are equal bit for bit"),
        (Parity(Numerics.EXACT, False, 9, 0.1, 0.1, "they part at step 4"), "the losses differ by 0.100; they part at step 4"),
        (Parity(Numerics.CHANGED, False, 9, 0.1, 0.2, ""), "changed by design (CHANGED), needs a convergence check"),
    ],
)
def test_parity_in_words(parity: Parity | None, told: str) -> None:
    assert told in words.parity(parity)


def test_a_reason_that_restates_the_numbers_is_told_once() -> None:
    restated = verdict(Decision.FASTER, reason="1.840× [1.800, 1.890]: the whole interval lies above 1")
    assert words.explanation(restated) == "A step takes 45.7 % less time."
    assert words.explanation(EVERY[Decision.SLOWER]) == "A step takes 3.1 % more time."
    assert words.explanation(EVERY[Decision.NO_DIFFERENCE]) == "Measured 1.003× [0.995, 1.011]."


def test_what_is_not_paid_back_is_only_stated() -> None:
    assert words.warmup_change(EVERY[Decision.FASTER]) == "+11.9 s, pays back after 120 steps (12.0 s)"
    assert words.warmup_change(EVERY[Decision.SLOWER]) == "+11.9 s"
    assert words.warmup_change(EVERY[Decision.DOES_NOT_RUN]) == "–"


def test_the_line_of_a_workload_tells_what_there_is() -> None:
    workload = {"name": "photos", "seed": 0, "parameters": 11181642, "convolutions": 20, "attention_layers": 0, "padding_share": 0.0,
                "linears_by_16": 3, "image_files": True, "data_bytes": 3 << 20, "workers": 0}  # fmt: skip
    now = StepBreakdown({"forward": 0.02}, 40, 320)
    record = RunRecord("one", "complete", "library", workload, "", {}, {}, {}, "2026-01-01", now, 0.1, None)
    told = "photos · seed 0 · parameters 11,181,642 · convolutions 20 · data 3.00 MiB · workers 0"
    assert run_words.workload_line(record) == told
