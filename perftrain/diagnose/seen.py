"""From the raw records of a watched program to the numbers that the rules ask for."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from perftrain.diagnose.probe import Probe
from perftrain.facts import PHASE_SPAN, StepBreakdown

WARM_STEPS = 3
COMPUTING = ("forward", "loss", "backward")
MATMUL = ("mm", "addmv", "aten::mv", "linear", "einsum", "_scaled_dot_product", "mkldnn_rnn_layer", "flash")
CONVOLUTION = ("conv",)
SPARSE = ("sparse", "_spmm")
COLLECTIVE = ("gloo:", "nccl:", "c10d::")
NO_OPERATION = (
    "ProfilerStep", PHASE_SPAN, "Optimizer.", "enumerate(", "autograd::engine", "Torch-Compiled", "## ", "DistributedDataParallel",
    "TorchDynamo", "CompiledFunction", "Pregraph", "AOTDispatcher", "CheckpointFunction",
)  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """A place where the training thread was seen, and for how long."""

    phase: str
    frames: tuple[tuple[str, int, str], ...]
    leaf: tuple[str, str]
    library: str
    seconds: float
    waited_s: float
    held_s: float

    @property
    def where(self) -> str:
        return f"{self.frames[0][0]}:{self.frames[0][1]}" if self.frames else ""


@dataclass(frozen=True)
class Operation:
    """One kind of operation in the traced steps, all calls together."""

    name: str
    dtype: str
    calls: int
    own_s: float
    flop: float
    tiny_calls: int
    tiny_s: float
    phase: str
    bytes: float = 0.0
    """Moved at least: inputs read, a result written."""


@dataclass(frozen=True)
class Seen:
    """One training process (rank 0), the loader's workers, and its other ranks."""

    process: Mapping[str, Any]
    fetchers: Sequence[Mapping[str, Any]] = ()
    others: Sequence[Mapping[str, Any]] = ()
    probes: Mapping[str, Probe] = field(default_factory=dict)
    folder: str = ""
    """Of the script: file names are told relative to it."""
    peaks: Mapping[str, Any] = field(default_factory=dict)
    """Of the machine, with the program's number of threads (:func:`perftrain.measure.peaks.peaks`); empty where not measured."""

    # --- steps ---
    @cached_property
    def window(self) -> list[int]:
        """The steps that count: after the warm-up, not traced, whole periods of what happens every so many steps."""
        rows, traced = self.process["rows"], set(self.process["traced"])
        steady = [i for i in range(min(WARM_STEPS, max(0, len(rows) - 2)), len(rows)) if i not in traced]
        for phase in ("evaluation", "checkpoint"):
            if phase in self.phases:
                at = [i for i in steady if self._spent(i, phase, 0) > 0]
                if 2 <= len(at) <= 0.7 * len(steady):
                    return [i for i in steady if at[0] < i <= at[-1]]
        return steady

    @property
    def phases(self) -> Sequence[str]:
        return self.process["phases"]

    def _spent(self, row: int, phase: str, clock: int) -> float:
        return self.process["rows"][row][3 + 3 * self.phases.index(phase) + clock]

    def step_times(self, indices: Iterable[int] | None = None) -> list[float]:
        rows = self.process["rows"]
        return [sum(rows[i][3::3]) for i in (self.window if indices is None else indices)]

    @cached_property
    def step_s(self) -> float:
        times = self.step_times()
        return sum(times) / len(times) if times else 0.0

    def phase_s(self, phase: str, clock: int = 0) -> float:
        """Seconds a step: wall (0), CPU of the training thread (1), CPU of the process (2)."""
        if phase not in self.phases or not self.window:
            return 0.0
        return sum(self._spent(i, phase, clock) for i in self.window) / len(self.window)

    def share(self, *phases: str) -> float:
        """Part of the step."""
        return sum(self.phase_s(p) for p in _with_loss(phases)) / self.step_s if self.step_s else 0.0

    @cached_property
    def process_cpu_s(self) -> float:
        return sum(self.phase_s(p, 2) for p in self.phases)

    def breakdown(self) -> StepBreakdown:
        phase_s = {p: self.phase_s(p) for p in self.phases if p != "loss"}
        if "loss" in self.phases:
            phase_s["forward"] = phase_s.get("forward", 0.0) + self.phase_s("loss")
        return StepBreakdown(phase_s, len(self.window), int(self.samples_per_step * len(self.window)))

    @cached_property
    def samples_per_step(self) -> float:
        fetched = self.fetching
        return fetched["samples"] / fetched["batches"] if fetched["batches"] else 0.0

    @cached_property
    def backwards_per_step(self) -> float:
        rows = self.process["rows"]
        return statistics.median(rows[i][2] for i in self.window) if self.window else 1

    # --- settings ---
    @property
    def cores(self) -> int:
        return int(self.process.get("cores") or 1)

    @property
    def threads(self) -> int:
        return int(self.process.get("threads") or 1)

    @property
    def ranks(self) -> int:
        return int(self.process.get("ranks") or 1)

    @property
    def on_cuda(self) -> bool:
        return self.process.get("device") == "cuda"

    @cached_property
    def loader(self) -> Mapping[str, Any]:
        """The loader that trains: the first alive with workers, else the first."""
        loaders = self.process.get("loaders") or []
        return loaders[0] if loaders else {}

    @property
    def workers(self) -> int:
        return int(self.loader.get("workers") or 0)

    # --- counters, after the warm-up ---
    def count(self, name: str, kind: str = "counts") -> float:
        """How much of a counter fell into one step of the whole run after the warm-up."""
        before = self.process["before"][0 if kind == "counts" else 1].get(name, 0) if self.process.get("before") else 0
        steps = len(self.process["rows"]) - (self.process["before"][2] if self.process.get("before") else 0)
        return (self.process[kind].get(name, 0) - before) / max(1, steps)

    @cached_property
    def whole_step_s(self) -> float:
        """Seconds a step over all steps after the warm-up, traced ones too: what :meth:`count` is to be compared with."""
        times = self.step_times(range(min(WARM_STEPS, len(self.process["rows"]) - 1), len(self.process["rows"])))
        return sum(times) / max(1, len(times))

    # --- batches ---
    @cached_property
    def fetching(self) -> dict[str, float]:
        """Sums over all processes that made batches."""
        total: dict[str, float] = defaultdict(float)
        sources = [f for f in self.fetchers if f["pid"] != self.process["pid"]] or [self.process["fetching"]]
        for source in sources:
            for key, value in source.items():
                if isinstance(value, (int, float)) and key != "pid":
                    total[key] += value
        for key in ("batches", "samples", "wall_s", "cpu_s", "delay_s", "collate_wall_s", "collate_cpu_s"):
            total.setdefault(key, 0.0)
        return dict(total)

    # --- operations ---
    @property
    def trace(self) -> Mapping[str, Any]:
        return self.process.get("trace") or {}

    @cached_property
    def operations(self) -> list[Operation]:
        """What ran on the host's threads in the traced steps, without the names that only mark spans."""
        return [Operation(*o) for o in self.trace.get("operations", []) if not o[0].startswith(NO_OPERATION)]

    def operation_share(self, words: Sequence[str], dtypes: Sequence[str] = (), big: bool = False, without: Sequence[str] = ()) -> float:
        """Part of the traced time that operations with one of ``words`` in their names took by themselves."""
        wall = self.trace.get("wall_s") or 0.0
        own = sum(
            o.own_s - (o.tiny_s if big else 0.0) for o in self.operations
            if any(w in o.name for w in words) and (not dtypes or o.dtype in dtypes) and not any(w in o.name for w in without)
        )  # fmt: skip
        return own / wall if wall else 0.0

    @cached_property
    def heavy_share(self) -> float:
        """Products and convolutions."""
        return self.operation_share((*MATMUL, *CONVOLUTION), without=("foreach", "embedding", *SPARSE))

    @cached_property
    def computing(self) -> list[Operation]:
        """The operations of forward (the loss too) and backward."""
        return [o for o in self.operations if o.phase in COMPUTING]

    @cached_property
    def elementwise_share(self) -> float:
        """Part of the step in operations of forward and backward that are long enough to matter and no products, "
        "convolutions or lookups."""
        heavy = (
            *MATMUL,
            *CONVOLUTION,
            *SPARSE,
            *COLLECTIVE,
            "embedding",
            "index",
            "gather",
            "scatter",
            "lstm",
            "gru",
            "record_param_comms",
        )
        wall = self.trace.get("wall_s") or 0.0
        own = sum(o.own_s - o.tiny_s for o in self.computing if o.name.startswith("aten::") and not any(w in o.name for w in heavy))
        return own / wall if wall else 0.0

    @property
    def traced_computing_s(self) -> float:
        """Seconds of the traced steps in forward, loss and backward."""
        return sum((self.trace.get("phase_s") or {}).get(p, 0.0) for p in COMPUTING)

    @cached_property
    def launch_share(self) -> float:
        """Part of the step in forward and backward outside of operations that are long enough to matter: launching, and Python.

        Where the process used no CPU it launched nothing: it waited, for another rank say.
        """
        computing = self.traced_computing_s
        if not computing or not self.step_s:
            return 0.0
        big = sum(o.own_s - o.tiny_s for o in self.computing)
        known = self.process_cpu_s > 0  # a trace from elsewhere has no such clock
        waiting_s = sum(max(0.0, self.phase_s(p) - self.phase_s(p, 2)) for p in COMPUTING) * known
        return max(0.0, (1 - big / computing) * self.share("forward", "backward") - waiting_s / self.step_s)

    @cached_property
    def calls_per_step(self) -> float:
        return sum(o.calls for o in self.computing) / max(1, self.trace.get("steps") or 1)

    # --- places ---
    @cached_property
    def samples(self) -> list[Sample]:
        return [_sample(row) for row in self.process.get("samples", [])]

    @cached_property
    def worker_samples(self) -> list[Sample]:
        return [_sample(row) for f in self.fetchers for row in f.get("rows", [])]

    def lines(self, *phases: str) -> list[tuple[str, str, float]]:
        """(file:line, function, share of the time of these phases), the most seen first; the user's innermost line counts."""
        seen: dict[tuple[str, str], float] = defaultdict(float)
        phases = _with_loss(phases)
        for sample in self.samples if phases != ("worker",) else self.worker_samples:
            if sample.phase in phases and sample.frames:
                seen[(self.relative(sample.where), sample.frames[0][2])] += sample.seconds
        whole = sum(seen.values())
        return [(where, function, s / whole) for (where, function), s in sorted(seen.items(), key=lambda i: -i[1])] if whole else []

    def relative(self, where: str) -> str:
        prefix = self.folder.rstrip("/") + "/"
        return where.removeprefix(prefix) if self.folder else where

    # --- memory ---
    @cached_property
    def growth_bytes_per_step(self) -> tuple[float, float]:
        """Slopes of the resident memory over the third and the last quarter of the run."""
        points = self.process.get("rss") or []
        half, rest = len(points) // 2, (3 * len(points)) // 4
        return _slope(points[half:rest]), _slope(points[rest:])


def _with_loss(phases: tuple[str, ...]) -> tuple[str, ...]:
    """The loss belongs to the forward pass."""
    return (*phases, "loss") if "forward" in phases else phases


def _slope(points: Sequence[Sequence[float]]) -> float:
    if len(points) < 3 or points[-1][0] == points[0][0]:
        return 0.0
    return statistics.linear_regression([p[0] for p in points], [p[1] for p in points]).slope


def _sample(row: Sequence[Any]) -> Sample:
    return Sample(row[0], tuple((f[0], f[1], f[2]) for f in row[1]), (row[2][0], row[2][1]), row[3], row[4], row[5], row[6])
