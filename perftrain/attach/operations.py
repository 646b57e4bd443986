"""A torch.profiler trace as sums by operation, and as the memory of one step: what the rules read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from perftrain.attach.work import flop, moved_bytes
from perftrain.facts import PHASE_SPAN, STEP_MARK

COMPILED = ("CompiledFxGraph",)
LAYOUT = ("aten::contiguous", "aten::clone")
MEMORY = "[memory]"
TINY_S = 20e-6
"""An operation shorter than this costs about as much to launch as to do."""
MOST_POINTS = 240
Spans = list[tuple[int, int, Any]]
"""Start in ns, minus the length in ns, the event: sorted, a span comes before those inside it."""


def by_operation(events: Iterable[Any]) -> dict[str, Any]:
    """Own time, calls, FLOP and bytes by phase, operation and dtype; how much of it is in operations of a few microseconds."""
    threads: dict[int, Spans] = defaultdict(list)
    device: dict[str, float] = defaultdict(float)
    for event in events:
        if event.name() == MEMORY:
            continue
        if "CUDA" in str(event.device_type()):
            device[event.name()] += event.duration_ns() / 1e9
        else:
            threads[event.start_thread_id()].append((event.start_ns(), -event.duration_ns(), event))
    ops: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0, 0, 0.0, 0.0])
    for thread in threads.values():
        thread.sort(key=lambda span: span[:2])
        _own_times(thread, ops)
    phases: dict[str, float] = defaultdict(float)
    for thread in threads.values():
        for _, negative, event in thread:
            if event.name().startswith(PHASE_SPAN) and event.name() != STEP_MARK:
                phases[event.name().removeprefix(PHASE_SPAN)] -= negative / 1e9
    rows = [[name, dtype, *v[:5], phase, v[5]] for (phase, name, dtype), v in ops.items() if not name.startswith(PHASE_SPAN)]
    rows.sort(key=lambda row: -row[3])
    return {
        "operations": rows[:200], "phase_s": dict(phases), "device_s": dict(device),
        "compiled_s": sum(_inside(t, COMPILED) for t in threads.values()), "layout_s": sum(_inside(t, LAYOUT) for t in threads.values()),
    }  # fmt: skip


def _inside(thread: Spans, words: tuple[str, ...]) -> float:
    """Seconds inside spans with one of these words in their names."""
    total, until = 0, 0
    for start, negative, event in thread:
        if start >= until and any(word in event.name() for word in words):
            total, until = total - negative, start - negative
    return total / 1e9


class _Open:
    """A span whose end has not been reached."""

    def __init__(self, start: int, negative: int, event: Any, around: str) -> None:
        self.end, self.own_ns, self.event = start - negative, -negative, event
        name = event.name()
        self.phase = name.removeprefix(PHASE_SPAN) if name.startswith(PHASE_SPAN) and name != STEP_MARK else around
        self.leaf = True


def _own_times(thread: Spans, ops: dict[tuple[str, str, str], list[float]]) -> None:
    """Add each span's time without that of the spans inside it, under the innermost phase around it."""
    around: list[_Open] = []
    for start, negative, event in thread:
        while around and start >= around[-1].end:
            _close(around.pop(), ops)
        if around:
            around[-1].own_ns += negative
            around[-1].leaf = False
        around.append(_Open(start, negative, event, around[-1].phase if around else "rest"))
    while around:
        _close(around.pop(), ops)


def _close(span: _Open, ops: dict[tuple[str, str, str], list[float]]) -> None:
    event, own_s = span.event, max(0, span.own_ns) / 1e9
    dtype = next((d for d in event.dtypes() if d not in ("", "Scalar", "long int")), "")
    row = ops[(span.phase, event.name(), dtype)]
    row[0] += 1
    row[1] += own_s
    row[2] += flop(event)
    if own_s < TINY_S:
        row[3] += 1
        row[4] += own_s
    row[5] += moved_bytes(event) if span.leaf else 0.0


# --- memory ---
def memory_of_a_step(events: Sequence[Any]) -> dict[str, Any]:
    """What one traced step allocates on top of what was there at its beginning, on the device if there is one.

    ``timeline``: [seconds since the step began, bytes]; ``phases``: [name, start, end]; ``activations_bytes``: what the forward
    pass leaves behind for the backward pass; ``workspace_bytes``: the most above that.
    """
    changes = sorted((e.start_ns(), e.nbytes(), "CUDA" in str(e.device_type())) for e in events if e.name() == MEMORY)
    on_device = any(cuda for *_, cuda in changes)
    marks = sorted(e.start_ns() for e in events if e.name() == STEP_MARK)
    if not changes or not marks:
        return {}
    begin, end = (marks[0], marks[1]) if len(marks) > 1 else (changes[0][0], marks[0])
    points, now = [(begin, 0)], 0
    for at, size, cuda in changes:
        if begin <= at < end and cuda == on_device:
            now += size
            points.append((at, now))
    spans = [e for e in events if e.name().startswith(PHASE_SPAN) and e.name() != STEP_MARK and begin <= e.start_ns() < end]
    kept = max((_level(points, e.end_ns()) - _level(points, e.start_ns()) for e in spans if e.name() == PHASE_SPAN + "forward"), default=0)
    most = max(size for _, size in points)
    return {
        "activations_bytes": max(0, kept), "workspace_bytes": max(0, most - max(0, kept)), "transient_bytes": most,
        "timeline": [[(at - begin) / 1e9, size] for at, size in _thinned(points)],
        "phases": [[e.name().removeprefix(PHASE_SPAN), (e.start_ns() - begin) / 1e9, (e.end_ns() - begin) / 1e9] for e in spans],
    }  # fmt: skip


def _level(points: Sequence[tuple[int, int]], at: int) -> int:
    return next((size for time, size in reversed(points) if time <= at), 0)


def _thinned(points: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """So many points that a drawing can show them: the highest of each stretch."""
    width = -(-len(points) // MOST_POINTS)
    return [max(points[i : i + width], key=lambda p: p[1]) for i in range(0, len(points), width)]
