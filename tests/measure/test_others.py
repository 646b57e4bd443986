"""What other programs use of the cores: this one and its descendants do not count."""

from __future__ import annotations

import subprocess
import sys
import time

from perftrain.measure.others import others_s

BURN = "import time; end = time.process_time() + 1.0\nwhile time.process_time() < end: pass"
ORPHAN = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {BURN!r}])"
"""Leaves a process behind that is nobody's descendant here."""


def used_over(seconds: float, source: str) -> float:
    """Until the program has ended, and ``seconds`` at least."""
    before = others_s()
    until = time.monotonic() + seconds
    subprocess.run([sys.executable, "-c", source], check=True)
    time.sleep(max(0.0, until - time.monotonic()))
    return others_s() - before


def test_a_stranger_counts_and_a_child_does_not() -> None:
    own = min(used_over(0.0, BURN) for _ in range(3))  # a second of CPU time each
    strange = min(used_over(2.5, ORPHAN) for _ in range(2))
    assert strange > own + 0.5
