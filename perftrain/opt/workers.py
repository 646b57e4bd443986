"""Loader worker processes: the next batches are made while the model trains on this one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from perftrain.cores import usable_cores
from perftrain.facts import Bottleneck, Card, Gain, Numerics, PerftrainError, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import LoaderOptions


@dataclass(frozen=True)
class Workers(Switch):
    """Read, decode and collate in ``num_workers`` processes of their own.

    Pays where the step waits for data and cores (or a slow disk) are idle meanwhile. Not where loading is a few per cent, nor
    for tiny samples: every batch is then copied through shared memory for nothing. On a CPU the workers and the model share
    the same cores. Default: one worker a core, at most 8.
    """

    num_workers: int | None = None

    card: ClassVar[Card] = Card(
        name="workers",
        summary="load batches in worker processes (default: one a core, at most 8)",
        place=Place.LOADER,
        numerics=Numerics.EXACT,
        relieves=(Bottleneck.INPUT_WORKERS, Bottleneck.INPUT_STORAGE, Bottleneck.INPUT_DECODE, Bottleneck.INPUT_COLLATE),
        requires=("a DataLoader",),
        cost="memory of the worker processes; their start at every epoch",
    )

    def __post_init__(self) -> None:
        if self.num_workers is not None and self.num_workers < 0:
            raise PerftrainError(f"workers.num_workers is 0 or more; it was {self.num_workers}. Try opt.workers.num_workers=2.")

    def count(self) -> int:
        return self.num_workers if self.num_workers is not None else min(8, usable_cores())

    def predict(self, now: StepBreakdown) -> Gain:
        share = now.share("data_wait")
        return Gain(1.0, 1 / (1 - min(share, 0.99)), f"the step waits for data {share:.0%} of its time; at best all of that vanishes")

    def loader(self, options: LoaderOptions) -> LoaderOptions:
        return replace(options, num_workers=self.count())
