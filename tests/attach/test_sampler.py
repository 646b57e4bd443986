"""The sampler blames the line that runs, also where Python holds the interpreter between operations of torch."""

import sys
import threading
import time
from collections import defaultdict

import torch

from perftrain.attach import sampler


def counting(rows: list[int]) -> dict[int, int]:
    counts: dict[int, int] = defaultdict(int)
    for row in rows:
        counts[row] += 1
    return counts


def test_python_between_operations_is_blamed_and_not_the_operation_after_it() -> None:
    """Python takes some milliseconds at a time: less than the interval after which it would let go by itself."""
    rows, weights = list(range(60)) * 1000, torch.randn(256, 256)
    watching = sampler.Sampler(threading.get_ident(), lambda: "rest")
    python_s = torch_s = 0.0
    watching.start()
    for _ in range(150):
        begin = time.perf_counter()
        counting(rows)
        middle = time.perf_counter()
        for _ in range(4):
            weights @ weights
        python_s, torch_s = python_s + middle - begin, torch_s + time.perf_counter() - middle
    watching.stop()
    watching.join()
    seen: dict[str, float] = defaultdict(float)
    for (_, frames, _, _), seconds in watching.seen.items():
        seen[frames[0][2] if frames else ""] += seconds
    share = seen["counting"] / sum(seen.values())
    assert share > 0.6 * python_s / (python_s + torch_s)
    assert sys.getswitchinterval() == 0.005


def test_a_jump_between_two_lines_is_of_the_line_before_it() -> None:
    """Wherever in a function the interpreter stands, there is a line of its body to blame."""
    code = counting.__code__

    class Frame:
        f_code = code
        f_lasti = 0

    lines = set()
    for begin, _, line in code.co_lines():
        frame = Frame()
        frame.f_lasti = begin
        found = sampler._line_before(frame)  # type: ignore[arg-type]
        assert line is None or found == line
        lines.add(found)
    assert lines <= set(range(code.co_firstlineno, code.co_firstlineno + 5))
