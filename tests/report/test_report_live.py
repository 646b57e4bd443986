"""The live view: drawn at most once a second on a terminal, plain lines elsewhere, nothing of its own in between."""

import io
import threading

import pytest
from rich.console import Console

from perftrain.facts import Progress, StepBreakdown
from perftrain.report import live
from perftrain.report.live import live_view

STEP = StepBreakdown({"data_wait": 0.02, "forward": 0.03, "[own]": 0.05}, 10, 640)


def at(step: int) -> Progress:
    return Progress(step, 1000, 0.1 * step, STEP, loss=0.25)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    return now


def test_on_a_terminal_phases_throughput_loss_and_what_is_left(clock: list[float]) -> None:
    to = io.StringIO()
    terminal = Console(file=to, force_terminal=True, width=100, _environ={"TERM": "xterm"})
    threads = threading.active_count()
    with live_view("Training [red]digits[/]", terminal) as show:
        show(at(100))
        assert threading.active_count() == threads
        drawn = to.getvalue()
        show(at(101))
        clock[0] += 0.9
        show(at(102))
        assert to.getvalue() == drawn
        clock[0] += 0.2
        show(at(103))
    assert "step 103 of" in to.getvalue()
    assert "step 102 of" not in to.getvalue()
    told = ("Training [red]digits[/]", "100 of 1,000", "100 ms a step", "640 samples/s", "loss 0.250", "90.0 s left", "[own] 50.0 %", "░")
    for said in told:
        assert said in drawn, said


def test_off_a_terminal_a_line_now_and_then(clock: list[float]) -> None:
    to = io.StringIO()
    with live_view("Training", Console(file=to, width=40)) as show:
        for step in range(1, 101):
            clock[0] += 1
            show(at(step))
    first, *between, last = to.getvalue().splitlines()
    assert first == "Training …"
    assert [line.split(" · ")[1] for line in between] == ["step 30 of 1,000", "step 60 of 1,000", "step 90 of 1,000"]
    assert last.startswith("Training: done after ")
    assert "\x1b" not in to.getvalue()


def test_a_failure_leaves_the_terminal_as_it_was() -> None:
    to = io.StringIO()
    terminal = Console(file=to, force_terminal=True, width=80, _environ={"TERM": "xterm"})
    with pytest.raises(RuntimeError), live_view(console=terminal) as show:  # noqa: PT012
        show(at(1))
        raise RuntimeError
    assert to.getvalue().rindex("\x1b[?25h") > to.getvalue().rindex("\x1b[?25l")  # the cursor is back
