"""What is printed: plain off a terminal, within the width, the decision first."""

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from test_report_words import DIAGNOSIS, EVERY, FAST, HEADLINES, RECORD, SLOW, verdict

from perftrain.facts import Decision, StepBreakdown
from perftrain.report import terminal
from perftrain.report.bars import PhaseBar, cells, phases_of

DOCTOR = {
    "machine": {"cpu": "Xeon", "cores": 2, "memory_bytes": 2**33},
    "settings": {"threads": 2, "deterministic": False},
    "peaks": {"matmul": {"float32": {"amount": 2e11, "seconds": 2.0}}, "copy": {"amount": 1e10, "seconds": 1.0}},
    "limits": [{"what": "no GPU", "because": "this build of torch [cpu] has no CUDA"}, {}],
    "opts": [
        {"name": "amp", "numerics": "CLOSE", "relieves": ["compute.precision"], "runs_here": True, "summary": "16 bits"},
        {"name": "tf32", "runs_here": False, "reason": "needs a [GPU]"},
    ],
}


def shown(draw: Any, *facts: Any, width: int = 100, encoding: str = "utf-8") -> str:
    """What ``draw`` prints off a terminal."""
    raw = io.BytesIO()
    to = io.TextIOWrapper(raw, encoding=encoding, errors="replace")
    draw(Console(file=to, width=width), *facts)
    to.flush()
    return raw.getvalue().decode(encoding)


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize(
    ("draw", "facts"),
    [
        (terminal.print_run, (RECORD, DIAGNOSIS)),
        (terminal.print_run, (replace(RECORD, status="failed", breakdown=StepBreakdown({}, 0, 0), reason="[/] out of memory"),)),
        *((terminal.print_verdict, (v, DIAGNOSIS.causes[0].tries)) for v in EVERY.values()),
        (terminal.print_ranking, (EVERY.values(),)),
        (terminal.print_ranking, ([],)),
        (terminal.print_runs, ([RECORD, replace(RECORD, status="failed", breakdown=StepBreakdown({}, 0, 0))],)),
        (terminal.print_doctor, (DOCTOR,)),
        (terminal.print_doctor, ({},)),
        (terminal.print_opts, (DOCTOR["opts"],)),
    ],
)
def test_plain_and_within_the_width(draw: Any, facts: tuple[Any, ...], width: int) -> None:
    text = shown(draw, *facts, width=width)
    assert text.strip()
    assert max(cell_len(row) for row in text.splitlines()) <= width
    assert not re.search(r"\x1b|\bnan\b|\binf\b|None|…", text)


@pytest.mark.parametrize("decision", list(Decision))
def test_the_decision_comes_first(decision: Decision) -> None:
    assert shown(terminal.print_verdict, EVERY[decision]).splitlines()[0] == HEADLINES[decision]


def test_verdict_tells_cost_parity_and_measurement() -> None:
    text = flat(shown(terminal.print_verdict, EVERY[Decision.FASTER], DIAGNOSIS.causes[0].tries, width=120))
    for part in (
        "with amp (dtype=bfloat16)",
        "data wait 70.0 ms 2.00 ms −97.1 %",
        "samples/s 348 640 +84.0 %",
        "memory peak 3.00 GiB 4.00 GiB +33.3 %",
        "+11.9 s, pays back after 120 steps (12.0 s)",
        "the same (CLOSE): over 100 steps the losses differ by 0.00210, within the 0.0105 between the baseline's own seeds",
        "24 pairs in 2 processes, 84.0 s; anything over 1.4 % would have been seen",
        "both on huge pages",
        "workers (predicted 1.30–1.60×): 4 workers [bold]decode",
        "by hand: draft mode | PIL",
    ):
        assert part in text
    assert "NOT the same (CLOSE)" in shown(terminal.print_verdict, EVERY[Decision.CHANGES_RESULT])


def test_a_bundle_is_not_attributed() -> None:
    several = verdict(Decision.FASTER, switches=("amp", "compile"), settings={})
    assert "A bundle of 2 switches: the result cannot be attributed to one of them." in shown(terminal.print_verdict, several)
    assert "A bundle" not in shown(terminal.print_verdict, EVERY[Decision.FASTER])


def test_both_bars_have_one_scale_and_each_phase_its_glyph() -> None:
    rows = [r for r in shown(terminal.print_verdict, EVERY[Decision.FASTER]).splitlines() if re.match(r"(baseline|amp) +\d", r)]
    long, short = (len(r.split(" ms  ")[1].rstrip()) for r in rows)
    assert short / long == pytest.approx(FAST.step_s / SLOW.step_s, abs=0.02)
    glyphs = set(rows[0].split(" ms  ")[1].strip())
    assert len(glyphs) == len(phases_of([SLOW]))
    assert phases_of([SLOW])[-2:] == ["my_phase", "rest"]


def test_bars_without_unicode_are_ascii() -> None:
    text = shown(lambda console: console.print(PhaseBar(SLOW, phases_of([SLOW]), SLOW.step_s)), encoding="ascii")
    assert "?" not in text
    assert len(text.strip()) == 100


def test_rounded_cells_add_up() -> None:
    assert sum(cells([1 / 7] * 7, 1.0, 60)) == 60
    assert cells([0.0, 0.0], 0.0, 60) == [0, 0]


def test_ranking_order_and_intervals() -> None:
    rows = shown(terminal.print_ranking, reversed(EVERY.values()), width=120).splitlines()
    one = rows[0].index("1×")
    assert rows[1].index("●") > one >= rows[4].index("●")
    assert rows[3].index("├") < one < rows[3].rindex("┤")
    assert rows[6][one] == "│"
    assert "no difference over 1.4 %" in rows[2]


def test_run_tells_where_time_went_and_what_follows() -> None:
    text = flat(shown(terminal.print_run, RECORD, DIAGNOSIS, width=120))
    for part in (
        "photos · batch size 64",
        "cpu Xeon · memory 8.00 GiB · torch 2.11.0",
        "with workers (num_workers=4)",
        "step 184 ms (mean of 120 steps)",
        "data wait 70.0 38.0 %",
        "throughput 348 samples/s",
        "accuracy 0.912",
        "loss –",
        "memory peak –",
        "bottleneck 38 % of each step waits for decoding.",
        "at most 1.61× if it vanished",
        "the queue was empty [at] 96 % of the steps (train.py:57)",
        "behind it compute.layout (20.0 %, at most 1.10×)",
        "will not help amp: computing is not what it waits for",
    ):
        assert part in text


def test_doctor_and_runs() -> None:
    text = flat(shown(terminal.print_doctor, DOCTOR))
    for part in (
        "matmul float32 100 GFLOP/s",
        "copy 10.0 GB/s",
        "no GPU: this build of torch [cpu]",
        "1 switch that cannot tf32",
    ):
        assert part in text
    assert "20260102-a1b2" in shown(terminal.print_runs, [RECORD], width=60)
    assert "No runs" in shown(terminal.print_runs, [])
