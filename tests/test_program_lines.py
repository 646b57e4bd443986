"""Command lines with a script: what is ours, and what belongs to the script."""

from __future__ import annotations

import pytest

from perftrain.facts import PerftrainError
from perftrain.options import sort_out


@pytest.fixture(autouse=True)
def script(tmp_path, monkeypatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)


def test_what_follows_the_script_belongs_to_it() -> None:
    line = sort_out(["diagnose", "--json", "out.json", "--full", "train.py", "--budget", "7", "-m", "x=1"])
    assert line.program == ("train.py", "--budget", "7", "-m", "x=1")
    assert line.flags == {"--json": "out.json"}
    assert line.full


def test_a_module() -> None:
    assert sort_out(["diagnose", "-m", "package.train", "--lr", "1"]).program == ("-m", "package.train", "--lr", "1")


def test_a_recipe_has_no_program() -> None:
    line = sort_out(["diagnose", "recipe=digits"])
    assert (line.program, line.overrides) == ((), ("recipe=digits",))


def test_try_on_both() -> None:
    assert sort_out(["try", "amp,workers=4", "train.py", "a"]).overrides == ("amp,workers=4",)
    assert sort_out(["try", "amp", "recipe=digits"]).overrides == ("+opt=[amp]", "recipe=digits")


def test_tune_and_gate() -> None:
    assert sort_out(["tune", "tune.min_gain=0.05", "train.py"]).overrides == ("tune.min_gain=0.05",)
    assert sort_out(["gate", "--baseline", "b.json", "train.py", "--x"]).flags == {"--baseline": "b.json"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["diagnose", "lr=1", "train.py"], "'lr=1' is none"),
        (["try", "--fast", "train.py"], "names of switches"),
        (["gate", "train.py"], "what it is compared with"),
        (["gate", "--baseline", "b.json"], "needs a script"),
        (["diagnose", "--baseline", "b.json", "train.py"], "belongs to perftrain gate"),
        (["try", "amp", "--nsys", "train.py"], "names of switches|belongs to perftrain diagnose"),
        (["diagnose", "--nsys", "report.sqlite", "train.py"], "a report or a program"),
        (["diagnose", "--nsys", "--ncu", "train.py"], "one such flag at a time"),
        (["diagnose", "torchrun", "--nproc-per-node", "2", "train.py"], "-m torch.distributed.run"),
        (["report"], "one run"),
        (["runs", "--out", "x"], "belongs to perftrain report"),
    ],
)
def test_mistakes_are_told(words: list[str], said: str) -> None:
    with pytest.raises(PerftrainError, match=said):
        sort_out(words)
