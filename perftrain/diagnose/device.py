"""The timeline of a device, whichever profiler wrote it down, as sums that the rules ask for; no torch needed."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from perftrain.diagnose.intervals import Intervals, holds, intersect, overlap, total, union, without

TINY_KERNEL_S = 10e-6
"""A kernel shorter than this takes about as long to launch as to run."""
SHORT_GAP_S = 1e-3
"""Gaps shorter than this lie between launches; in longer ones the host does something else."""
MOST_KERNELS = 50
CLASSES = (
    ("communication", ("nccl", "rccl")),
    ("layout", ("nchwtonhwc", "nhwctonchw")),
    ("attention", ("flash", "fmha", "attention")),
    ("convolution", ("conv", "cudnn_", "scudnn", "winograd", "fprop", "dgrad", "wgrad")),
    ("product", ("gemm", "gemv", "cutlass", "cublas", "nvjet", "wgmma", "dot_kernel")),
    ("optimizer", ("multi_tensor_apply",)),
    ("reduction", ("reduce", "softmax", "norm", "bn_", "triton_red", "triton_per")),
    ("indexing", ("index", "gather", "scatter", "embedding")),
    ("elementwise", ("elementwise", "triton_poi", "copy", "fill", "dropout")),
)
"""Of a kernel, by words in its name; the first that fits."""
SINGLE = re.compile(r"sgemm|scudnn|f32f32_f32f32")
TENSOR_CORES = re.compile(r"tf32|1688|tensorop|884|16816|wgmma")


def class_of(kernel: str) -> str:
    name = kernel.lower()
    return next((label for label, words in CLASSES if any(word in name for word in words)), "other")


def in_float32(kernel: str) -> bool:
    """A product or convolution that its name says runs in float32, without tensor cores."""
    name = kernel.lower()
    return bool(SINGLE.search(name)) and not TENSOR_CORES.search(name)


@dataclass(frozen=True)
class Work:
    """One kernel, copy or filling of memory on the device."""

    start_s: float
    end_s: float
    name: str
    kind: str = "kernel"
    """``kernel``, ``copy`` or ``fill``."""
    bytes: int = 0
    upload: bool = False
    """A copy from the host to the device, ..."""
    pageable: bool = False
    """...from (or to) memory that is not pinned: the host waits for it."""
    stream: int = 0

    @property
    def span(self) -> tuple[float, float]:
        return self.start_s, self.end_s


@dataclass(frozen=True)
class Call:
    """The host waits for the device in one of CUDA's functions."""

    start_s: float
    end_s: float
    name: str


@dataclass(frozen=True)
class Host:
    """What the training thread did meanwhile, as far as the report tells."""

    waits: Sequence[Call] = ()
    data_wait: Intervals = ()
    between: Intervals = ()
    """In none of the phases, where phases are marked."""
    aside: Intervals = ()
    """Evaluation and checkpoints, which have rules of their own."""


def device_trace(work: Iterable[Work], host: Host, borders: Intervals) -> dict[str, Any]:
    """Sums over the steps between ``borders``: how busy the device was, with what, and why it was idle."""
    region = union(borders)
    first, last = region[0][0], region[-1][1]
    work = sorted((w for w in work if first <= w.start_s < last), key=lambda w: w.start_s)
    kernels = [w for w in work if w.kind == "kernel"]
    busy = union(w.span for w in work)
    computing = union(w.span for w in kernels if class_of(w.name) != "communication")
    talking = union(w.span for w in kernels if class_of(w.name) == "communication")
    uploads = [w for w in work if w.upload]
    waits = [c for c in host.waits if first <= c.start_s < last]
    return {
        "wall_s": total(region), "device_busy_s": total(intersect(busy, region)), "device_calls": len(work),
        "kernels": by_kernel(kernels), "class_s": class_seconds((w.name, w.end_s - w.start_s) for w in kernels),
        "float32_s": sum(w.end_s - w.start_s for w in kernels if in_float32(w.name)), "fusible_s": _fusible_s(kernels),
        "uploads": [len(uploads), sum(w.bytes for w in uploads), sum(w.pageable for w in uploads)],
        "exposed_upload_s": total(without(union(w.span for w in uploads), union(w.span for w in kernels))),
        "exposed_communication_s": total(without(talking, computing)), "waits": _by_name(waits),
        **_idle(busy, region, waits, host),
    }  # fmt: skip


def _idle(busy: Intervals, region: Intervals, waits: Sequence[Call], host: Host) -> dict[str, Any]:
    """Seconds without work for the device, by what it waited for.

    ``data_wait``: the next batch was missing. ``sync``: it ran dry while the host waited for it, and had to be filled anew.
    ``between``: the host was in no phase of the step. ``launching``: the rest.
    """
    gaps = without(without(region, busy), host.aside)
    waiting = union((c.start_s, c.end_s) for c in waits)
    drained = [g for g in gaps if holds(waiting, g[0])]
    others = without(without(gaps, union(drained)), host.data_wait)
    between = intersect(others, host.between)
    launching = without(others, between)
    short = [g for g in launching if g[1] - g[0] < SHORT_GAP_S]
    return {
        "idle_s": {"data_wait": total(intersect(gaps, host.data_wait)), "sync": total(without(drained, host.data_wait)),
                   "between": total(between), "launching": total(launching)},
        "short_gap_s": total(short), "usual_gap_s": statistics.median(b - a for a, b in short) if short else 0.0,
    }  # fmt: skip


def by_kernel(kernels: Iterable[Work]) -> list[list[Any]]:
    """[name, class, calls, seconds, calls shorter than ``TINY_KERNEL_S``] of each kernel, the longest first."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0])
    for each in kernels:
        row, seconds = sums[each.name], each.end_s - each.start_s
        row[0] += 1
        row[1] += seconds
        row[2] += seconds < TINY_KERNEL_S
    rows = [[name, class_of(name), *values] for name, values in sums.items()]
    return sorted(rows, key=lambda row: -row[3])[:MOST_KERNELS]


def class_seconds(named: Iterable[tuple[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for name, seconds in named:
        sums[class_of(name)] += seconds
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _fusible_s(kernels: Sequence[Work]) -> float:
    """What fusing would save at most: of each chain of elementwise kernels one reads and writes, the others need not."""
    saved = 0.0
    for stream in {w.stream for w in kernels}:
        own = [(class_of(w.name), w.end_s - w.start_s) for w in kernels if w.stream == stream]
        saved += chains_s(own)
    return saved


def chains_s(named: Iterable[tuple[str, float]]) -> float:
    """Seconds of (class, seconds) kernels in order that are in elementwise chains, but for one in each chain."""
    saved = 0.0
    for label, chain in groupby(named, key=lambda each: each[0]):
        times = [seconds for _, seconds in chain]
        saved += sum(times) * (1 - 1 / len(times)) if label == "elementwise" else 0.0
    return saved


def _by_name(waits: Iterable[Call]) -> list[list[Any]]:
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for each in waits:
        sums[each.name][0] += 1
        sums[each.name][1] += each.end_s - each.start_s
    return sorted(([name, *values] for name, values in sums.items()), key=lambda row: -row[2])


def rows_of(borders: Intervals, phases: Mapping[str, Intervals]) -> tuple[list[str], list[list[float]]]:
    """Names of the phases, and the steps as a watched process leaves them: wall time stands for the CPU times, which no report has."""
    rows = []
    for begin, end in borders:
        spent = [overlap(parts, begin, end) for parts in phases.values()]
        rows.append([end, 1, 1, *(v for s in (*spent, max(0.0, end - begin - sum(spent))) for v in (s, s, s))])
    return [*phases, "rest"], rows


def process_of(device: str, borders: Intervals, phases: Mapping[str, Intervals], trace: Mapping[str, Any]) -> dict[str, Any]:
    """A record like that of a watched process, of which only a report is known."""
    names, rows = rows_of(borders, phases)
    return {
        "pid": 0, "rank": 0, "ranks": 1, "device": device, "cores": 1, "threads": 1, "torch": "", "phases": names, "rows": rows,
        "traced": [], "counts": {}, "sums": {}, "before": [{}, {}, 0], "samples": [], "fetching": {}, "compiling": {}, "roots": [],
        "optimizers": [], "rss": [], "trace": {"steps": len(borders), "operations": [], "forwards": [], "inputs": [], **trace},
    }  # fmt: skip
