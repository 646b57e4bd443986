"""How many threads compute: within one operation, between operations, and in each loader worker."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch

from perftrain.cores import core_numbers
from perftrain.facts import Bottleneck, Card, Gain, Numerics, PerftrainError, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import LoaderOptions, Plan

VARIABLE = "PERFTRAIN_INTER_OP_THREADS"
"""Torch takes the number of inter-op threads once in a process's life: the variable gives that arm a process of its own."""
TOPOLOGY = Path("/sys/devices/system/cpu")
CONTAINER = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True)
class Threads(Switch):
    """Compute with ``intra_op`` threads in one operation (None: one for each physical core that this process may use).

    Pays where torch's own choice is wrong: hyperthreads counted as cores, a container with fewer cores than the machine,
    workers and model on the same cores (too many), ``OMP_NUM_THREADS=1`` left over (too few). Not where the choice is right
    already: the verdict then says no difference. ``inter_op`` is for programs that run operations side by side (``torch.jit.fork``,
    streams of a scripted model). ``per_worker`` pays where a sample itself takes long tensor operations and cores are idle; torch
    gives a worker one thread. Source: PyTorch documentation, "CPU threading".
    """

    intra_op: int | None = None
    inter_op: int | None = None
    per_worker: int | None = None

    card: ClassVar[Card] = Card(
        name="threads",
        summary="threads of one operation (default: one a physical core), between operations, and of each loader worker",
        place=Place.PROCESS,
        numerics=Numerics.CLOSE,  # sums are cut into as many parts as there are threads
        relieves=(Bottleneck.THREADS_CONFIG,),
        requires=("per_worker: a loader with workers",),
        cost="cores that others no longer have",
    )

    def __post_init__(self) -> None:
        for name in ("intra_op", "inter_op", "per_worker"):
            seen = getattr(self, name)
            if seen is not None and seen < 1:
                raise PerftrainError(f"threads.{name} is 1 or more; it was {seen}. Try opt.threads.{name}=1.")

    def count(self) -> int:
        return self.intra_op if self.intra_op is not None else physical_cores()

    def describe(self, plan: Plan) -> str:
        return f"{self.count()} threads for one operation; {torch.get_num_threads()} without the switch"

    def predict(self, now: StepBreakdown) -> Gain:
        share = now.share("forward", "backward", "optimizer")
        return Gain.from_share(share, 1.0, 2.0, f"computing is {share:.0%} of the step; a wrong number of threads wastes a part of it")

    def environment(self) -> Mapping[str, str]:
        return {} if self.inter_op is None else {VARIABLE: str(self.inter_op)}

    @contextmanager
    def process(self) -> Iterator[None]:  # type: ignore[override]
        before = torch.get_num_threads()
        if self.inter_op is not None:
            set_inter_op(self.inter_op)
        try:
            torch.set_num_threads(self.count())
            yield
        finally:
            torch.set_num_threads(before)

    def loader(self, options: LoaderOptions) -> LoaderOptions:
        if self.per_worker is None:
            return options
        return replace(options, worker_init_fn=WorkerThreads(self.per_worker, options.worker_init_fn))


@dataclass(frozen=True)
class WorkerThreads:
    """A ``worker_init_fn`` that sets torch's threads in a worker, then runs the user's own. Picklable if that is."""

    threads: int
    inner: Callable[[int], None] | None = None

    def __call__(self, worker_id: int) -> None:
        torch.set_num_threads(self.threads)
        if self.inner is not None:
            self.inner(worker_id)


def set_inter_op(count: int) -> None:
    """Torch's inter-op threads, for the rest of this process's life.

    Raises:
        PerftrainError: it is too late in this process.
    """
    if torch.get_num_interop_threads() == count:
        return
    try:
        torch.set_num_interop_threads(count)
    except RuntimeError:
        raise PerftrainError(
            f"Torch takes the number of inter-op threads once, before anything ran in parallel; this process has "
            f"{torch.get_num_interop_threads()} already and threads.inter_op={count} came later. Start a new process."
        ) from None


def physical_cores(topology: Path = TOPOLOGY, container: Path = CONTAINER) -> int:
    """Cores this process may use: hyperthreads of one core counted once, and no more than its container may use."""
    cpus = core_numbers()
    cores = len({_core_of(cpu, topology) for cpu in cpus})
    return max(1, min(cores, _container_cores(container, cores)))


def _core_of(cpu: int, topology: Path) -> tuple[str, str]:
    folder = topology / f"cpu{cpu}" / "topology"
    try:
        return (folder / "physical_package_id").read_text().strip(), (folder / "core_id").read_text().strip()
    except OSError:  # no such files here: every logical CPU counts
        return "", str(cpu)


def _container_cores(container: Path, otherwise: int) -> int:
    try:
        quota_us, period_us = container.read_text().split()
        return otherwise if quota_us == "max" else math.ceil(int(quota_us) / int(period_us))
    except (OSError, ValueError):
        return otherwise
