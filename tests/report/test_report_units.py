"""Numbers as people read them."""

import math

import pytest

from perftrain.report import units


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (units.seconds(0.184), "184 ms"),
        (units.seconds(0.9996), "1.00 s"),
        (units.seconds(42e-6), "42.0 µs"),
        (units.seconds(245), "4 min 5 s"),
        (units.seconds(7800), "2 h 10 min"),
        (units.seconds(-0.5), "−500 ms"),
        (units.seconds(0.0), "0 s"),
        (units.milliseconds(0.0041), "4.10"),
        (units.size(640 * 2**20), "640 MiB"),
        (units.size(3.41 * 2**30), "3.41 GiB"),
        (units.flops(2e11, 2.0), "100 GFLOP/s"),
        (units.flops(8.12e14, 1.0), "812 TFLOP/s"),
        (units.bandwidth(1.24e10, 1.0), "12.4 GB/s"),
        (units.three(12_345), "12,300"),
        (units.three(0.0), "0"),
        (units.three(1.5e-7), "1.50e−07"),
        (units.share(0.382), "38.2 %"),
        (units.change(0.1, 0.184), "−45.7 %"),
        (units.change(2.0, 1.0), "+100 %"),
        (units.factor(1.84, (1.80, 1.89)), "1.84× [1.80, 1.89]"),
        (units.factor(1.004, (0.998, 1.011)), "1.004× [0.998, 1.011]"),
        (units.between(1.3, 1.6), "1.30–1.60×"),
        (units.count(1, "pair"), "1 pair"),
        (units.count(2, "process"), "2 processes"),
        (units.count(3, "switch"), "3 switches"),
        (units.fact("memory_bytes", 2**33), "8.00 GiB"),
        (units.fact("deterministic", False), "no"),
        (units.fact("gpus", [{"name": "H200", "memory_bytes": 2**37}]), "name H200, memory 128 GiB"),
    ],
)
def test_number(told: str, expected: str) -> None:
    assert told == expected


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_is_a_dash(value: float | None) -> None:
    tell = (units.three, units.seconds, units.milliseconds, units.size, units.share, units.factor)
    assert {told(value) for told in tell} == {"–"}
    assert {units.flops(value, 1.0), units.flops(1.0, value), units.bandwidth(1.0, 0.0), units.change(value, 1.0)} == {"–"}
    assert units.change(1.0, 0.0) == units.change(1.0, value) == units.between(value, 1.2) == units.fact("x", value) == "–"


def test_escape_sequences_are_taken_out() -> None:
    assert units.printable("\x1b[31mred\x1b[0m\r\a\ttab\nnext") == "red tab\nnext"
    assert units.one_line("a\n  b") == "a b"
