"""A report of Nsight Systems, exported to SQLite, read into what the rules ask for; no torch and no nsys needed.

Tables come and go with versions and with what was recorded; all but the kernels may be missing. Times are nanoseconds. Schema:
https://docs.nvidia.com/nsight-systems/UserGuide/index.html#sqlite-schema-reference
"""

from __future__ import annotations

import re
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

from perftrain.diagnose.device import Call, Host, Work, device_trace, process_of
from perftrain.diagnose.intervals import Interval, Intervals, total, union, without
from perftrain.diagnose.seen import WARM_STEPS, Seen
from perftrain.facts import PHASE_SPAN, STEP_MARK, PerftrainError

KERNELS, COPIES, FILLS = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"
GRAPHS, CALLS, RANGES = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
UPLOAD, PAGEABLE = 1, 0
"""``copyKind`` host to device; ``srcKind`` and ``dstKind`` of memory that is not pinned."""
THREAD_BITS = 0xFFFFFF
"""The low bits of a ``globalTid`` are the thread's; the others are its process's ``globalPid``."""
WAITING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize", "cuCtxSynchronize")
STEP = re.compile(r"(ProfilerStep#|((train(ing)?[ _-]?)?(step|iter|iteration|batch))[ _#:=-]*)\d+$", re.IGNORECASE)
PHASES = (
    ("backward", re.compile(r"backward|autograd::engine", re.IGNORECASE)),
    ("forward", re.compile(r"forward", re.IGNORECASE)),
    ("optimizer", re.compile(r"optim|zero_grad|clip_grad", re.IGNORECASE)),
    ("data_wait", re.compile(r"data.?(load|wait|fetch)|(load|next|get|fetch).?(data|batch)|data$", re.IGNORECASE)),
    ("copy", re.compile(r"h2d|(to|copy).?device", re.IGNORECASE)),
    ("evaluation", re.compile(r"eval|valid", re.IGNORECASE)),
    ("checkpoint", re.compile(r"checkpoint|save", re.IGNORECASE)),
)
"""What people name their own ranges."""


def read_nsys(path: Path) -> Seen:
    """The report as if the program had been watched.

    Raises:
        PerftrainError: no such file, no SQLite export of nsys, or one without kernels.
    """
    if not path.is_file():
        raise PerftrainError(f"There is no report {str(path)!r}. Type the file that nsys export --type sqlite wrote.")
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            return _read(_Tables(connection), path)
    except (sqlite3.Error, TypeError, KeyError) as error:
        raise PerftrainError(
            f"{path} is no SQLite export of Nsight Systems ({type(error).__name__}: {error}). "
            "Type: nsys export --type sqlite report.nsys-rep."
        ) from None


class _Tables:
    """Rows by table and column; what is not there is empty or None."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._names = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")}
        self.strings: dict[int, str] = {row[0]: str(row[1]) for row in self.rows("StringIds", "id", "value")}

    def rows(self, table: str, *columns: str) -> list[tuple[Any, ...]]:
        if table not in self._names:
            return []
        known = {row[1] for row in self._connection.execute(f"PRAGMA table_info({table})")}
        chosen = ", ".join(f'"{c}"' if c in known else "NULL" for c in columns)
        return self._connection.execute(f"SELECT {chosen} FROM {table}").fetchall()

    def text(self, identity: int | None) -> str:
        return self.strings.get(identity, "") if identity is not None else ""


def _read(tables: _Tables, path: Path) -> Seen:
    device, process = _first_device(tables)
    if device is None:
        raise PerftrainError(
            f"{path} holds no kernels of a CUDA device. Record with nsys profile --trace=cuda,nvtx, on a machine with one, "
            "and long enough to train some steps."
        )
    work = _work(tables, device)
    thread, ranges = _ranges(tables, process)
    borders, source = _borders(tables, thread, process, ranges, work)
    phases = _innermost(ranges)
    named = union(part for parts in phases.values() for part in parts)
    waits = _waits(tables, process)
    region = union(borders)
    aside = union([*phases.get("evaluation", ()), *phases.get("checkpoint", ())])
    host = Host(waits, phases.get("data_wait", ()), without(region, named) if named else (), aside)
    trace = device_trace(work, host, borders)
    phases["sync"] = without(union((c.start_s, c.end_s) for c in waits), named)
    found = process_of("cuda", borders, phases, {**trace, "steps_from": source, "phase_s": {n: total(p) for n, p in phases.items()}})
    return Seen(found)


def _first_device(tables: _Tables) -> tuple[int | None, int | None]:
    """The device that is looked at, the first with a fair share of the kernels, and the process that uses it."""
    used = Counter(tables.rows(KERNELS, "deviceId", "globalPid")) + Counter(tables.rows(GRAPHS, "deviceId", "globalPid"))
    if not used:
        return None, None
    most = max(used.values())
    return min((each for each, number in used.items() if number >= 0.5 * most), key=lambda each: (each[0], each[1] or 0))


def _work(tables: _Tables, device: int) -> list[Work]:
    found = []
    columns = ("start", "end", "deviceId", "demangledName", "shortName", "streamId")
    for start, end, where, name, short, stream in tables.rows(KERNELS, *columns):
        if where == device and end is not None:
            found.append(Work(start / 1e9, end / 1e9, tables.text(name) or tables.text(short) or "kernel", stream=stream or 0))
    columns = ("start", "end", "deviceId", "bytes", "copyKind", "srcKind", "dstKind")
    for start, end, where, size, kind, source, to in tables.rows(COPIES, *columns):
        if where == device and end is not None:
            found.append(Work(start / 1e9, end / 1e9, "copy", "copy", size or 0, kind == UPLOAD, PAGEABLE in (source, to)))
    for table, kind in ((FILLS, "fill"), (GRAPHS, "kernel")):
        for start, end, where in tables.rows(table, "start", "end", "deviceId"):
            if where == device and end is not None:
                found.append(Work(start / 1e9, end / 1e9, "CUDA graph" if kind == "kernel" else kind, kind))
    return found


def _waits(tables: _Tables, process: int | None) -> list[Call]:
    """Every thread's: the backward pass may have one of its own."""
    found = []
    for start, end, thread, identity in tables.rows(CALLS, "start", "end", "globalTid", "nameId"):
        name = tables.text(identity)
        if end is not None and name.startswith(WAITING) and _same_process(thread, process):
            found.append(Call(start / 1e9, end / 1e9, name.split("_v")[0]))
    return found


def _same_process(thread: int | None, process: int | None) -> bool:
    return thread is None or process is None or thread & ~THREAD_BITS == process & ~THREAD_BITS


# --- phases and steps ---
Range = tuple[float, float, str]
"""Start, end, phase."""


def _events(tables: _Tables, process: int | None) -> list[tuple[int, int | None, str, int | None]]:
    """(start, end, text, thread) of the process's NVTX ranges and marks."""
    rows = tables.rows(RANGES, "start", "end", "text", "textId", "globalTid")
    return [(s, e, text or tables.text(i), thread) for s, e, text, i, thread in rows if s is not None and _same_process(thread, process)]


def _ranges(tables: _Tables, process: int | None) -> tuple[int | None, list[Range]]:
    """The training thread, which has the most phases, and its ranges that name a phase."""
    by_thread: dict[int | None, list[Range]] = defaultdict(list)
    for start, end, text, thread in _events(tables, process):
        phase = _phase(text)
        if end is not None and phase:
            by_thread[thread].append((start / 1e9, end / 1e9, phase))
    if not by_thread:
        return None, []
    thread = max(by_thread, key=lambda t: len({r[2] for r in by_thread[t]}) * 10**6 + len(by_thread[t]))
    return thread, by_thread[thread]


def _phase(text: str) -> str:
    if text.startswith(PHASE_SPAN):
        return "" if text == STEP_MARK else text.removeprefix(PHASE_SPAN)
    if text.startswith("aten::"):
        return ""
    return next((phase for phase, pattern in PHASES if pattern.search(text)), "")


def _innermost(ranges: Sequence[Range]) -> dict[str, list[Interval]]:
    """Disjoint stretches by phase: a phase inside another takes its time away from it."""
    found: dict[str, list[Interval]] = defaultdict(list)
    around: list[list[Any]] = []  # end, phase, from when on it is the innermost

    def close(until: float) -> None:
        while around and around[-1][0] <= until:
            end, phase, since = around.pop()
            found[phase].append((since, end))
            if around:
                around[-1][2] = max(around[-1][2], end)

    for start, end, phase in sorted(ranges, key=lambda r: (r[0], -r[1])):
        close(start)
        if around:
            found[around[-1][1]].append((around[-1][2], start))
        around.append([end, phase, start])
    close(float("inf"))
    return {phase: union(parts) for phase, parts in found.items()}


def _borders(
    tables: _Tables, thread: int | None, process: int | None, ranges: Sequence[Range], work: Sequence[Work]
) -> tuple[Intervals, str]:
    """Begin and end of each step but the first few, and where they are from."""
    events = _events(tables, process)
    marks = sorted(s / 1e9 for s, _, text, _ in events if text == STEP_MARK)
    source = "perftrain's marks"
    if len(marks) < 2:
        own = [each for each in events if each[1] is not None and (thread is None or each[3] == thread)]
        steps = sorted((s / 1e9, (e or s) / 1e9) for s, e, text, _ in own if STEP.match(text))
        marks = [*(s for s, _ in steps), steps[-1][1]] if steps else []
        source = "NVTX ranges named like steps"
    if len(marks) < 2:
        first = min([w.start_s for w in work] + [r[0] for r in ranges])
        marks, source = [first, max([w.end_s for w in work] + [r[1] for r in ranges])], ""
    borders = list(pairwise(marks))
    return borders[WARM_STEPS:] if len(borders) > 2 * WARM_STEPS else borders, source
