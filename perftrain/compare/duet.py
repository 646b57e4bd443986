"""Timing two arms against each other: rounds of interleaved blocks in fresh processes, until the interval is narrow.

One process hosts both arms where their environments are equal; otherwise a pair of processes, one arm each. Either way a
round builds both arms anew (another memory layout), warms them, and lets them take turns ABBA or BAAB; its result is one
log ratio. Rounds are repeated in several fresh processes. When to stop depends on the width of the interval, never on
where it lies, so looking does not bias the answer. Pairs of turns during which other programs used the cores are set aside
for what those did, never for what was timed.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from perftrain.compare.channel import Worker, WorkerFailed
from perftrain.facts import ArmSummary, PerftrainError, StepBreakdown
from perftrain.measure.others import others_s
from perftrain.measure.statistics import Estimate, estimate

BASELINE, VARIANT = "baseline", "variant"
QUIET_CORES = 0.1
"""Two turns are quiet if other programs kept less than this busy meanwhile (cores, on average). The idle time that the kernel tells
is right to a few hundredths for turns of the default length."""
ASIDE_SHARE = 0.05
"""Of the turns: fewer disturbed ones are not worth a word."""
LEAST_QUIET = 5
"""Processes with quiet turns, from which on only those count."""


@dataclass(frozen=True)
class Protocol:
    """How much is measured. Every number stands in configs/measure."""

    budget_s: float = 45.0
    """Seconds of rounds for one comparison. Starting each process and its first build (compiling) come on top."""
    resolution: float = 0.015
    """Stop early once an effect of this size would be seen."""
    max_resolution: float = 0.06
    """Coarser than this and the answer is "not resolved"."""
    min_effect: float = 0.01
    """A difference that may be smaller than this is no difference."""
    processes: int = 5
    """Fresh processes (or pairs) at least."""
    rounds_per_process: int = 5
    """Rounds of one process at most, before another process takes over."""
    block_s: float = 0.12
    """Seconds of one turn (three steps at least)."""
    max_cycles: int = 8
    """ABBA cycles of one round at most."""
    stabilize: bool = True
    """Settings of malloc for both arms that scatter less (see benchmarks/measuring), where no switch is about them."""
    parity_steps: int = 30
    parity_seeds: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        least = dict.fromkeys(["resolution", "max_resolution", "min_effect", "seed"], 0.0)
        least |= dict.fromkeys(["processes", "rounds_per_process", "max_cycles", "parity_seeds"], 1)
        least |= {"budget_s": 0.1, "block_s": 0.001, "parity_steps": 2}
        for name, at_least in least.items():
            seen = getattr(self, name)
            if not at_least <= seen < math.inf:
                example = Protocol.__dataclass_fields__[name].default
                rule = f"measure.{name} is a number, {at_least} or more"
                raise PerftrainError(f"{rule}; it was {seen}. Try measure.{name}={example}.")


@dataclass
class Timing:
    """What the blocks of both arms said."""

    groups: list[list[float]] = field(default_factory=list)
    """log(baseline / variant), seconds of a sample, of every round, by process."""
    quiet: list[list[float]] = field(default_factory=list)
    """The same of the quiet turns alone; rounds without any are missing."""
    facts: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {BASELINE: [], VARIANT: []})
    spent_s: float = 0.0
    """Of the budget."""
    round_ends_s: list[float] = field(default_factory=list)
    """``spent_s`` at the end of each round."""
    seconds: float = 0.0
    """All in all."""
    other_cores: float = 0.0
    """Cores that other programs kept busy meanwhile, on average."""
    interrupted: bool = False

    def estimate(self) -> Estimate:
        return estimate(self.quiet if self.chooses() else self.groups)

    def chooses(self) -> bool:
        """Whether enough turns were quiet for only those to count."""
        return sum(map(bool, self.quiet)) >= min(LEAST_QUIET, len(self.groups)) and sum(map(len, self.quiet)) >= 4

    def disturbed(self) -> bool:
        """Whether other programs were busy during turns that could not be set aside."""
        return not self.chooses() and self.disturbed_share() > ASIDE_SHARE

    def disturbed_share(self) -> float:
        """Of all turns."""
        blocks = [block for arm in self.facts.values() for block in arm]
        return sum(not block["quiet"] for block in blocks) / max(1, len(blocks))

    def rounds(self) -> int:
        return sum(len(g) for g in self.groups)

    def summary(self, arm: str, peak_bytes: int | None, warmup_s: float) -> ArmSummary:
        every = not self.chooses()
        blocks = [b for b in self.facts[arm] if every or b["quiet"]]
        steps = sum(b["steps"] for b in blocks)
        names = dict.fromkeys(name for b in blocks for name in b["phase_s"])
        phase_s = {name: sum(b["phase_s"].get(name, 0.0) for b in blocks) / steps for name in names} if steps else {}
        breakdown = StepBreakdown(phase_s=phase_s, steps=steps, samples=sum(b["samples"] for b in blocks))
        return ArmSummary(breakdown=breakdown, peak_bytes=peak_bytes, warmup_s=warmup_s)


class VariantFailed(Exception):
    """The variant, and not the program as it was, failed. ``failure`` says how."""

    def __init__(self, failure: WorkerFailed) -> None:
        super().__init__(str(failure))
        self.failure = failure


def time_arms(
    spec: Mapping[str, Any],
    environments: Mapping[str, Mapping[str, str]],
    protocol: Protocol,
    on_progress: Callable[[float, str], None] = lambda done_s, note: None,
) -> Timing:
    """Measure until the interval is narrow enough or the budget is spent. Progress counts seconds of the budget.

    Raises:
        WorkerFailed: the baseline failed.
        VariantFailed: the variant did.
    """
    timing = Timing()
    rng = random.Random(protocol.seed)
    begin, used_s = time.monotonic(), others_s()
    split = environments[BASELINE] != environments[VARIANT]
    try:
        while not _done(timing, protocol):
            left_s = protocol.budget_s - timing.spent_s
            group = _Group(spec, environments, split, protocol, rng, timing)
            group.run(left_s / max(1, protocol.processes - len(timing.groups)), on_progress)
    except KeyboardInterrupt:
        timing.interrupted = True
    timing.seconds = time.monotonic() - begin
    timing.other_cores = max(0.0, others_s() - used_s) / timing.seconds
    return timing


def _done(timing: Timing, protocol: Protocol) -> bool:
    if len(timing.groups) < protocol.processes:
        return False
    if timing.spent_s >= protocol.budget_s * 0.97:
        return True
    if timing.rounds() < 12:
        return False
    found = timing.estimate()
    return found.rounds >= 12 and found.resolution <= protocol.resolution


class _Group:
    """The rounds of one fresh process, or of one fresh pair."""

    def __init__(
        self,
        spec: Mapping[str, Any],
        environments: Mapping[str, Mapping[str, str]],
        split: bool,
        protocol: Protocol,
        rng: random.Random,
        timing: Timing,
    ) -> None:
        self.spec, self.environments, self.split = spec, environments, split
        self.protocol, self.rng, self.timing = protocol, rng, timing
        self.ratios: list[float] = []
        self.quiet: list[float] = []

    def run(self, share_s: float, on_progress: Callable[[float, str], None]) -> None:
        """Rounds for ``share_s`` seconds, which begin once both arms were built for the first time."""
        timing, protocol = self.timing, self.protocol
        timing.groups.append(self.ratios)
        timing.quiet.append(self.quiet)
        with ExitStack() as stack:
            if self.split:
                workers = {a: stack.enter_context(Worker(self.spec, self.environments[a])) for a in (BASELINE, VARIANT)}
            else:
                worker = stack.enter_context(Worker(self.spec, self.environments[BASELINE]))
                workers = {BASELINE: worker, VARIANT: worker}
            for arm in (BASELINE, VARIANT):
                self._call(workers, arm, "build", seed=protocol.seed)
            for host in dict.fromkeys(workers.values()):
                host.call("drop")
            used_s = took_s = 0.0
            while not self.ratios or (len(self.ratios) < protocol.rounds_per_process and used_s + 0.7 * took_s < share_s):
                begin = time.monotonic()
                self._round(workers)
                took_s = time.monotonic() - begin
                used_s += took_s
                timing.spent_s += took_s
                timing.round_ends_s.append(timing.spent_s)
                on_progress(timing.spent_s, f"{timing.rounds()} rounds in {len(timing.groups)} processes")

    def _round(self, workers: Mapping[str, Worker]) -> None:
        seed = self.rng.randrange(1 << 30)
        order = [BASELINE, VARIANT] if self.rng.random() < 0.5 else [VARIANT, BASELINE]
        hosts = list(dict.fromkeys(workers.values()))
        for host in hosts:
            host.call("scatter", seed=self.rng.randrange(1 << 30))
        begin = time.monotonic()
        steps = {arm: self._steps(self._call(workers, arm, "build", seed=seed)["step_s"]) for arm in order}
        setup_s = time.monotonic() - begin
        pairs = [self._pair(workers, pair, steps) for pair in self._pairs(order, setup_s)]
        for host in hosts:
            host.call("drop")
        self.ratios.append(_ratio([seconds for seconds, _ in pairs]))
        if undisturbed := [seconds for seconds, quiet in pairs if quiet]:
            self.quiet.append(_ratio(undisturbed))

    def _pairs(self, order: list[str], setup_s: float) -> Iterator[list[str]]:
        """AB, BA again and again, until measuring has taken longer than building did (it costs what it costs)."""
        begin = time.monotonic()
        for _ in range(self.protocol.max_cycles):
            yield from (order, order[::-1])
            if time.monotonic() - begin > 1.5 * setup_s:
                return

    def _pair(self, workers: Mapping[str, Worker], arms: list[str], steps: Mapping[str, int]) -> tuple[dict[str, float], bool]:
        """One turn of each arm: seconds of a sample, and whether other programs left the cores alone meanwhile."""
        begin, used_s = time.monotonic(), others_s()
        blocks = {arm: self._call(workers, arm, "block", steps=steps[arm]) for arm in arms}
        quiet = (others_s() - used_s) / (time.monotonic() - begin) < QUIET_CORES
        for arm, block in blocks.items():
            self.timing.facts[arm].append({**block, "quiet": quiet})
        return {arm: block["seconds"] / (block["samples"] or block["steps"]) for arm, block in blocks.items()}, quiet

    def _steps(self, step_s: float) -> int:
        return max(3, min(5000, round(self.protocol.block_s / step_s)))

    def _call(self, workers: Mapping[str, Worker], arm: str, do: str, **arguments: Any) -> dict[str, Any]:
        try:
            return workers[arm].call(do, arm=arm, **arguments)
        except WorkerFailed as failure:
            if arm == VARIANT and failure.kind != "interrupted":
                raise VariantFailed(failure) from failure
            raise


def _ratio(pairs: Sequence[Mapping[str, float]]) -> float:
    """log(baseline / variant)."""
    return math.log(sum(p[BASELINE] for p in pairs) / sum(p[VARIANT] for p in pairs))
