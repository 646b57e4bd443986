"""What a rule returns, and the small words that rules share."""

from __future__ import annotations

import linecache
from collections.abc import Sequence

from perftrain.diagnose.probe import Probe
from perftrain.diagnose.seen import Seen
from perftrain.facts import Bottleneck, Cause, Evidence, Try

NOTABLE = 1.12
"""A cause whose removal gives less than this is not worth a sentence; below it a program counts as healthy."""


def bound(share: float) -> float:
    """Amdahl's ceiling: the speedup if ``share`` (0..1) of the step vanished."""
    return 1 / max(0.02, 1 - min(share, 0.98))


def cause(
    label: Bottleneck,
    share: float,
    upper: float,
    confidence: float,
    evidence: Sequence[str | Evidence],
    where: str = "",
    tries: Sequence[Try] = (),
) -> Cause:
    lines = tuple(e if isinstance(e, Evidence) else Evidence(e) for e in evidence if e)
    return Cause(label, min(1.0, max(0.0, share)), upper, confidence, lines, where, tuple(tries))


def saved(upper: float) -> float:
    """The part of the step that a speedup of ``upper`` takes away."""
    return max(0.0, 1 - 1 / upper)


def by_edit(edit: str, low: float, high: float, because: str) -> Try:
    return Try(predicted=(round(min(low, high), 3), round(max(low, high), 3)), because=because, edit=edit)


def by_switch(switch: str, low: float, high: float, because: str) -> Try:
    return Try(predicted=(round(min(low, high), 3), round(max(low, high), 3)), because=because, switch=switch)


def by_probe(switch: str, probe: Probe) -> Try:
    """A switch whose effect has been measured on the program itself."""
    return by_switch(switch, probe.low, probe.high, f"measured here in turns: {probe.speedup:.2f}× over {probe.blocks} turns")


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def top_function(seen: Seen, *phases: str) -> tuple[str, str, float]:
    """(heaviest line, name, share) of the user's function in which most of the time of these phases was spent: a loop spreads its
    time over many lines, none of which stands out."""
    functions: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for where, name, share in seen.lines(*phases):
        functions.setdefault((where.rpartition(":")[0], name), []).append((where, share))
    if not functions:
        return "", "", 0.0
    (_, name), lines = max(functions.items(), key=lambda f: sum(share for _, share in f[1]))
    return lines[0][0], name, sum(share for _, share in lines)


def top_line(seen: Seen, *phases: str) -> str:
    """The user's line where most of the time of these phases was spent, as ``file.py:57``, or an empty string."""
    lines = seen.lines(*phases)
    return lines[0][0] if lines else ""


def top_evidence(seen: Seen, *phases: str, least: float = 0.2) -> list[Evidence]:
    """The lines that took most of these phases, with their source."""
    found = []
    for where, function, part in seen.lines(*phases)[:3]:
        if part >= least:
            source = source_of(seen, where)
            found.append(Evidence(f"{part:.0%} of it at {where} in {function}{': ' + source if source else ''}", where))
    return found


def source_of(seen: Seen, where: str) -> str:
    name, _, line = where.rpartition(":")
    for path in (name, f"{seen.folder.rstrip('/')}/{name}"):
        text = linecache.getline(path, int(line)).strip() if line.isdigit() else ""
        if text:
            return text[:90]
    return ""
