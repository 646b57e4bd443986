"""Numbers as people read them: three significant digits, SI units, percent. What is not a finite number prints as "–"."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

GROWTH_BYTES = 50_000
"""A step that leaves less behind is not said to grow."""
UNKNOWN = "–"
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x09\x0b-\x1f\x7f-\x9f]")


def printable(value: object) -> str:
    """``str(value)`` without terminal escape sequences and control characters; line breaks stay."""
    return _CONTROL.sub("", str(value).replace("\t", " "))


def one_line(value: object) -> str:
    """``printable`` on a single line."""
    return " ".join(printable(value).split())


def known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def three(value: float | None) -> str:
    """Three significant digits: ``0.0123``, ``1.20``, ``348``, ``12,300``, ``1.23e+09``."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    rounded = float(f"{value:.3g}")
    if rounded == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(rounded)))
    if not -4 <= magnitude < 7:
        return _signed(f"{rounded:.2e}")
    return _signed(f"{rounded:,.{max(0, 2 - magnitude)}f}")


def seconds(value: float | None) -> str:
    """A duration: ``42.0 µs``, ``184 ms``, ``2.31 s``, ``4 min 5 s``, ``2 h 10 min``."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if abs(value) < 120:
        return _scaled(value, ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")), zero="0 s")
    sign, whole = ("−" if value < 0 else ""), round(abs(value))
    if whole < 7200:
        return f"{sign}{whole // 60} min {whole % 60} s"
    return f"{sign}{round(whole / 60) // 60} h {round(whole / 60) % 60} min"


def milliseconds(value: float | None) -> str:
    """Seconds as bare milliseconds, for a column headed "ms"."""
    return three(None if value is None else 1e3 * value)


def size(value: float | None) -> str:
    """Bytes: ``640 MiB``, ``3.41 GiB``."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return _scaled(value, ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")), zero="0 B")


def rate(amount: float | None, in_s: float | None) -> float | None:
    """Amount per second; None where that means nothing."""
    if amount is None or in_s is None or not math.isfinite(amount) or not 0 < in_s < math.inf:
        return None
    return amount / in_s


def flops(amount: float | None, in_s: float | None) -> str:
    """Arithmetic speed: ``92.1 GFLOP/s``, ``812 TFLOP/s``."""
    return _per_second(rate(amount, in_s), "FLOP/s")


def bandwidth(amount: float | None, in_s: float | None) -> str:
    """Bytes per second: ``12.4 GB/s``."""
    return _per_second(rate(amount, in_s), "B/s")


def share(value: float | None) -> str:
    """A part of a whole (0..1): ``38.2 %``."""
    return _percent(value, "")


def change(new: float | None, old: float | None) -> str:
    """From ``old`` to ``new`` in percent, always signed: ``−45.7 %``."""
    if new is None or old is None or not 0 < old < math.inf:
        return UNKNOWN
    return _percent(new / old - 1, "+")


def factor(value: float | None, ci: tuple[float, float] | None = None) -> str:
    """A speedup and its interval with equal decimals: ``1.84× [1.80, 1.89]``, ``1.004× [0.998, 1.011]``."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    decimals = 2 if abs(value) < 10 else 1
    if ci is None or not (known(ci[0]) and known(ci[1])):
        return f"{value:.{decimals}f}×"
    if ci[1] - ci[0] < 0.04:
        decimals = 3
    return f"{value:.{decimals}f}× [{ci[0]:.{decimals}f}, {ci[1]:.{decimals}f}]"


def between(low: float | None, high: float | None) -> str:
    """A predicted gain: ``1.30–1.60×``."""
    ends = [f"{end:.2f}" for end in (low, high) if end is not None and math.isfinite(end)]
    return "–".join(dict.fromkeys(ends)) + "×" if len(ends) == 2 else UNKNOWN


def count(number: int, thing: str) -> str:
    """``1 pair``, ``12 pairs``, ``2 processes``."""
    plural = thing + ("es" if thing.endswith(("s", "x", "ch", "sh")) else "s")
    return f"{number:,} {thing if number == 1 else plural}"


def fact(key: str, value: Any) -> str:
    """Any value of a record in words, its unit read from the end of the key (``_s``, ``_bytes``, ``_share``)."""
    if value is None or value == "" or (isinstance(value, Sequence | Mapping) and not value):
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return _number(key, value)
    if isinstance(value, Mapping):
        return ", ".join(f"{label(str(k))} {fact(str(k), v)}" for k, v in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return ", ".join(fact(key, v) for v in value)
    return one_line(value)


def brief(value: Any) -> bool:
    """Is it one plain value, fit for a line of many."""
    return isinstance(value, str | int | float) and value != ""


def label(key: str) -> str:
    """A key without its unit and underscores: ``peak_bytes`` → ``peak``."""
    return one_line(re.sub(r"_(s|bytes|share)$", "", key).replace("_", " "))


def _number(key: str, value: float) -> str:
    if key.endswith("_bytes"):
        return size(value)
    if key.endswith("_s"):
        return seconds(value)
    if key.endswith("_share"):
        return share(value)
    return f"{value:,}" if isinstance(value, int) else three(value)


def _scaled(value: float, steps: Sequence[tuple[float, str]], zero: str) -> str:
    """In the largest unit that leaves at least 1 after rounding to three digits (999.6 ms is 1.00 s)."""
    for unit, name in steps:
        if abs(float(f"{value / unit:.3g}")) >= 1:
            return f"{three(value / unit)} {name}"
    return zero if value == 0 else f"{three(value / steps[-1][0])} {steps[-1][1]}"


def _per_second(value: float | None, unit: str) -> str:
    if value is None:
        return UNKNOWN
    prefixes = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
    return _scaled(value, [(scale, prefix + unit) for scale, prefix in prefixes], zero=f"0 {unit}")


def _percent(value: float | None, sign: str) -> str:
    if value is None or not math.isfinite(value):
        return UNKNOWN
    percent = 100 * value
    decimals = 0 if abs(percent) >= 99.95 else 1 if abs(percent) >= 0.095 or percent == 0 else 2
    return _signed(f"{percent:{sign}z.{decimals}f}") + " %"


def _signed(digits: str) -> str:
    return digits.replace("-", "−")
