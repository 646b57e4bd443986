"""A bar on a terminal, plain lines elsewhere."""

import io

import pytest
from rich.console import Console

from perftrain.report.progress import progress


def test_off_a_terminal_one_plain_line_before_and_one_after(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("Measuring [red]amp[/]", total=90.0) as update:
        update(10.0, "round 1")
        update(20.0)
    out, err = capsys.readouterr()
    first, last = err.splitlines()
    assert out == ""
    assert first == "Measuring [red]amp[/] …"
    assert last.startswith("Measuring [red]amp[/]: done after ")
    assert "\x1b" not in err


def test_off_a_terminal_a_failure_is_not_called_done() -> None:
    to = io.StringIO()
    with pytest.raises(RuntimeError), progress("Compiling", console=Console(file=to)):
        raise RuntimeError
    assert ": stopped after " in to.getvalue()


def test_on_a_terminal_a_bar_with_the_detail_taken_literally() -> None:
    to = io.StringIO()
    terminal = Console(file=to, force_terminal=True, width=100, _environ={"TERM": "xterm"})
    with progress("Measuring [/] amp", total=2.0, console=terminal) as update:
        update(1.0, "round [red]4[/]")
        update(2.0)
    assert "Measuring [/] amp" in to.getvalue()
    assert "round [red]4[/]" in to.getvalue()
