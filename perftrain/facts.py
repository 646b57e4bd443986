"""The vocabulary that every room shares: enums and frozen records, units in names, standard library only.

Seconds end in ``_s``, bytes in ``_bytes``, shares (0..1) in ``_share``. Rates are never stored: an amount and the
seconds it took are, and whoever prints divides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

SCHEMA = 1
"""Version of everything written to disk or by ``--json``. A reader refuses what is newer than itself."""

PHASES = ("data_wait", "copy", "forward", "backward", "optimizer", "evaluation", "checkpoint", "rest")
"""Disjoint parts of a step, in the order they are drawn. A step lasts from the end of the step before to its own end."""

PHASE_SPAN, STEP_MARK = "perftrain::", "perftrain::end of step"
"""Names in a profiler's trace of a watched program: of a phase (the phase follows), and of the end of a step."""


class Bottleneck(StrEnum):
    """What a step waits for. The value is the label that users, records and the exam see."""

    INPUT_STORAGE = "input.storage"
    INPUT_DECODE = "input.decode"
    INPUT_WORKERS = "input.workers"
    INPUT_WORKER_RESTART = "input.worker_restart"
    INPUT_COLLATE = "input.collate"
    INPUT_TRANSFER = "input.transfer"
    PADDING_WASTE = "padding.waste"
    HOST_SYNC = "host.sync"
    HOST_PYTHON = "host.python"
    LAUNCH_OVERHEAD = "launch.overhead"
    COMPUTE_PRECISION = "compute.precision"
    COMPUTE_LAYOUT = "compute.layout"
    COMPUTE_MEMORY_BOUND = "compute.memory_bound"
    COMPUTE_REDUNDANT = "compute.redundant"
    COMPUTE_SATURATED = "compute.saturated"
    THREADS_CONFIG = "threads.config"
    OPTIMIZER_STEP = "optimizer.step"
    COMPILE_RECOMPILE = "compile.recompile"
    COMPILE_GRAPH_BREAK = "compile.graph_break"
    MEMORY_GROWTH = "memory.growth"
    MEMORY_CAPACITY = "memory.capacity"
    COMM_VOLUME = "comm.volume"
    COMM_SYNC = "comm.sync"
    COMM_IMBALANCE = "comm.imbalance"
    LOOP_EVAL = "loop.eval"
    LOOP_CHECKPOINT = "loop.checkpoint"
    STARTUP = "startup"


class Place(IntEnum):
    """Wrapping order of the switches, innermost first. This enum is the only copy of that order."""

    PROCESS = 1  # variables and process-wide settings: must stand before anything is built
    DATASET = 2  # what one sample is and how it is made (decoding, augmentation, caches): before anybody fetches it
    LOADER = 3  # which samples make a batch and who fetches them (workers, batch size, buckets)
    LOADER_ENGINE = 4  # another loader altogether, built from the options above
    PREFETCH = 5  # around the finished loader
    EDIT = 6  # swap layers, memory format: every later wrapper must see the final layers
    TENSOR_PARALLEL = 7  # shard layers while they are still plain modules
    CHECKPOINTING = 8  # wrap blocks before compile, which must see the wrapper to plan recomputation
    COMPILE = 9  # per block or whole, in place
    DATA_PARALLEL = 10  # hooks of DDP and FSDP stay outside the compiled blocks
    OPTIMIZER = 11  # built on the final parameters
    STEP = 12  # how often and around what a step does its work (accumulation, averages): inside precision
    PRECISION = 13  # autocast and loss scaling around the whole forward and loss
    GRAPH_CAPTURE = 14  # outermost: captures all of the above
    CONTROL = 15  # experiments on the instrument itself (nothing, delay): around everything that is real


class Numerics(StrEnum):
    """What a switch may do to the losses."""

    EXACT = "EXACT"  # the same losses bit for bit
    CLOSE = "CLOSE"  # within the noise that the seed makes
    CHANGED = "CHANGED"  # another training: needs a convergence check


class Decision(StrEnum):
    """Best first: the order of a ranking."""

    FASTER = "faster"
    NO_DIFFERENCE = "no_difference"
    NOT_RESOLVED = "not_resolved"
    SLOWER = "slower"
    CHANGES_RESULT = "changes_result"
    DOES_NOT_RUN = "does_not_run"


@dataclass(frozen=True)
class Gain:
    """A predicted speedup, ``low`` to ``high`` (1.0 = no change), and the reason in one sentence."""

    low: float
    high: float
    because: str

    @staticmethod
    def from_share(share: float, low: float, high: float, because: str) -> Gain:
        """Amdahl's law: the part ``share`` (0..1) of the step becomes ``low`` to ``high`` times as fast."""
        return Gain(1 / (1 - share + share / low), 1 / (1 - share + share / high), because)


@dataclass(frozen=True)
class Card:
    """What a switch says of itself; the tuner and ``perftrain opts`` read nothing else."""

    name: str
    """As typed: ``+opt=<name>``; also the name of its file and of its YAML."""
    summary: str
    """What the user gets, in one line."""
    place: Place
    numerics: Numerics
    relieves: tuple[Bottleneck, ...] = ()
    requires: tuple[str, ...] = ()
    """Conditions in words, for people; ``Switch.unavailable`` tests them."""
    conflicts: tuple[str, ...] = ()
    """Names of switches that cannot be on at the same time; naming it on one side is enough."""
    cost: str = ""
    """What is paid: first-step compile time, memory."""


@dataclass(frozen=True)
class StepBreakdown:
    """Where the time of a step goes: the mean over ``steps`` steady steps. The phases add up to ``step_s``."""

    phase_s: Mapping[str, float]
    """Mean seconds of one step spent in each phase (keys of :data:`PHASES`, or names of the user's own)."""
    steps: int
    samples: int
    """Samples trained on in those ``steps`` steps together."""

    @property
    def step_s(self) -> float:
        return sum(self.phase_s.values())

    def share(self, *phases: str) -> float:
        """The part (0..1) of the step that the named phases take together."""
        return sum(self.phase_s.get(p, 0.0) for p in phases) / self.step_s if self.step_s else 0.0

    def __str__(self) -> str:
        parts = (f"{name} {1e3 * s:.2f} ms ({self.share(name):.0%})" for name, s in self.phase_s.items() if s > 0)
        return f"step {1e3 * self.step_s:.2f} ms over {self.steps} steps: " + ", ".join(parts)


@dataclass(frozen=True)
class StepRow:
    """One step as measured."""

    step: int
    phase_s: Mapping[str, float]
    samples: int
    loss: float | None = None
    peak_bytes: int | None = None

    @property
    def step_s(self) -> float:
        return sum(self.phase_s.values())


@dataclass(frozen=True)
class Evidence:
    """One observation, in numbers."""

    line: str
    where: str = ""
    """``file.py:57`` in the user's code, where one line is to blame."""


@dataclass(frozen=True)
class Try:
    """A switch (or an edit by hand) that should help, with the predicted gain."""

    predicted: tuple[float, float]
    because: str
    switch: str = ""
    edit: str = ""


@dataclass(frozen=True)
class Avoid:
    switch: str
    because: str


@dataclass(frozen=True)
class Cause:
    label: Bottleneck
    share: float
    """Part of the step (0..1) that it takes."""
    upper_bound: float
    """Speedup if it vanished altogether."""
    confidence: float
    evidence: tuple[Evidence, ...]
    where: str = ""
    tries: tuple[Try, ...] = ()
    avoids: tuple[Avoid, ...] = ()


@dataclass(frozen=True)
class Diagnosis:
    breakdown: StepBreakdown
    causes: tuple[Cause, ...]
    """Ranked: the first one rules."""
    healthy: bool
    sentence: str
    """The ruling bottleneck in one sentence."""
    memory: Mapping[str, Any] = field(default_factory=dict)
    """Bytes by category (:func:`perftrain.diagnose.memory.memory_facts`)."""
    roofline: Mapping[str, Any] = field(default_factory=dict)
    """FLOP and bytes against the machine's peaks (:func:`perftrain.diagnose.roofline.roofline`)."""


@dataclass(frozen=True)
class ArmSummary:
    """One side of a comparison, as measured in it."""

    breakdown: StepBreakdown
    peak_bytes: int | None
    warmup_s: float
    """From the start of building to the first steady step: imports excluded, compiling included."""
    bottleneck: str = ""
    """Label of the ruling bottleneck."""
    final_loss: float | None = None


@dataclass(frozen=True)
class Parity:
    """Did the training stay the same?"""

    numerics: Numerics
    holds: bool
    steps: int
    """Steps whose losses were compared."""
    distance: float
    """Root mean square difference of the (smoothed) losses from the baseline's, same seed and batches."""
    envelope: float
    """The same between the baseline's own seeds: what CLOSE may not exceed."""
    detail: str


@dataclass(frozen=True)
class Verdict:
    """The answer about one switch, or about a bundle of them. ``speedup`` = baseline step time / variant step time."""

    switches: tuple[str, ...]
    decision: Decision
    reason: str
    speedup: float | None = None
    ci95: tuple[float, float] | None = None
    resolution: float | None = None
    """The smallest relative effect that would have been seen."""
    pairs: int = 0
    """Paired observations behind the interval (rounds, or pairs of processes)."""
    processes: int = 0
    parity: Parity | None = None
    baseline: ArmSummary | None = None
    variant: ArmSummary | None = None
    break_even_steps: float | None = None
    """Steps after which the extra warm-up is paid back; None where there is none to pay or it never is."""
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    fingerprint: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The switches' fields, as set: ``{"amp": {"dtype": "bfloat16"}}``."""


def ranked(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Best first: by decision, then by what is certain of the speedup (the lower end of its interval)."""
    order = list(Decision)

    def certain(verdict: Verdict) -> float:
        bounds = (verdict.ci95[0] if verdict.ci95 else None, verdict.speedup)
        return next((bound for bound in bounds if bound is not None and math.isfinite(bound)), 0.0)

    return sorted(verdicts, key=lambda v: (order.index(v.decision), -certain(v), v.switches))


@dataclass(frozen=True)
class RunRecord:
    """One training run. ``steps`` rows are kept beside it (``steps.csv``)."""

    run_id: str
    status: str
    """``complete``, ``interrupted`` (stopped from outside, what was measured is kept) or ``failed``."""
    role: str
    """``baseline``, ``variant`` or ``library``."""
    workload: Mapping[str, Any]
    fingerprint: str
    settings: Mapping[str, Any]
    """The switches that were on, with their fields."""
    environment: Mapping[str, Any]
    machine: Mapping[str, Any]
    started: str
    """UTC, ISO 8601."""
    breakdown: StepBreakdown
    warmup_s: float
    peak_bytes: int | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    parity_losses: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Seed -> losses of its first steps: the envelope that CLOSE switches must stay in."""
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Progress:
    """How far a training is, and its latest steps: what a live view draws."""

    step: int
    """Steps done."""
    steps: int
    """Steps asked for."""
    seconds: float
    """Since the first step began."""
    breakdown: StepBreakdown
    """Of the steps since the message before."""
    loss: float | None = None
    """The latest that is known; on a device it may be some steps old, as nobody waits for it."""


class PerftrainError(ValueError):
    """A mistake that the user can mend. The message states the rule, what was seen, and what to type."""


def to_dict(record: Any) -> Any:
    """A frozen record as plain JSON values (enums by value; NaN and infinity as None come from the caller)."""
    return asdict(record)


def breakdown_from(raw: Mapping[str, Any]) -> StepBreakdown:
    return StepBreakdown(phase_s=dict(raw["phase_s"]), steps=int(raw["steps"]), samples=int(raw["samples"]))


def run_record_from(raw: Mapping[str, Any]) -> RunRecord:
    """The inverse of :func:`to_dict` for a run; unknown keys (from a later minor version) are left out."""
    known = {k: raw[k] for k in RunRecord.__dataclass_fields__ if k in raw}
    return RunRecord(**{**known, "breakdown": breakdown_from(raw["breakdown"])})


def progress_from(raw: Mapping[str, Any]) -> Progress:
    """The inverse of :func:`to_dict` for what a worker process told."""
    return Progress(**{**raw, "breakdown": breakdown_from(raw["breakdown"])})
