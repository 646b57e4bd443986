"""The steps of a run as a trace that https://ui.perfetto.dev and chrome://tracing draw."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from perftrain.facts import PHASES, PerftrainError, StepRow

PROCESS, TRACK = 1, 1
NOTE = "A phase that occurs several times in a step is drawn once, as long as all of them; phases stand in a fixed order."


def trace_of(name: str, rows: Sequence[StepRow]) -> str:
    """The trace as JSON: one track, each step above its phases, and counters of what was recorded beside them.

    Raises:
        PerftrainError: there are no steps.
    """
    if not rows:
        raise PerftrainError(f"A trace is made of the steps of a recorded run; {name} has none. Type: perftrain report RUN --trace.")
    head = [
        {"name": "process_name", "ph": "M", "pid": PROCESS, "args": {"name": name}},
        {"name": "thread_name", "ph": "M", "pid": PROCESS, "tid": TRACK, "args": {"name": "steps"}},
    ]
    whole = {"displayTimeUnit": "ms", "otherData": {"note": NOTE}, "traceEvents": [*head, *_events(rows)]}
    return json.dumps(whole, separators=(",", ":"), allow_nan=False)


def _events(rows: Sequence[StepRow]) -> Iterator[dict[str, Any]]:
    own = [p for p in dict.fromkeys(p for row in rows for p in row.phase_s) if p not in PHASES]
    order = (*PHASES[:-1], *own, PHASES[-1])
    now_s = 0.0
    for row in rows:
        begin_s = now_s
        phases = []
        for phase in order:
            if (spent_s := row.phase_s.get(phase, 0.0)) > 0:
                phases.append(_slice(phase, now_s, now_s + spent_s))
                now_s += spent_s
        yield {**_slice(f"step {row.step}", begin_s, now_s), "args": {"samples": row.samples}}
        yield from phases
        for counter, value in (("loss", row.loss), ("peak memory (bytes)", row.peak_bytes)):
            if value is not None and math.isfinite(value):
                yield {"name": counter, "ph": "C", "pid": PROCESS, "ts": _us(now_s), "args": {counter: value}}


def _slice(name: str, begin_s: float, end_s: float) -> dict[str, Any]:
    """From edge to edge in whole nanoseconds, so that slices touch and never overlap."""
    begin_us = _us(begin_s)
    return {"name": name, "ph": "X", "pid": PROCESS, "tid": TRACK, "ts": begin_us, "dur": round(_us(end_s) - begin_us, 3)}


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 3)
