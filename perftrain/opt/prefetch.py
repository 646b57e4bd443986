"""How many batches each loader worker makes ahead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from perftrain.facts import Bottleneck, Card, Gain, Numerics, PerftrainError, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import LoaderOptions


@dataclass(frozen=True)
class Prefetch(Switch):
    """Each worker makes up to ``factor`` batches ahead (``DataLoader(prefetch_factor=...)``; torch's own is 2).

    Pays where batches take very unequal times to make: a longer queue outlasts the slow ones. Not where loading is too slow on
    average; then the queue is empty however long it may be.
    """

    factor: int = 4

    card: ClassVar[Card] = Card(
        name="prefetch",
        summary="each loader worker makes more batches ahead (default 4 instead of 2)",
        place=Place.LOADER,
        numerics=Numerics.EXACT,
        relieves=(Bottleneck.INPUT_WORKERS, Bottleneck.INPUT_STORAGE),
        requires=("a DataLoader with workers",),
        cost="memory of the batches that wait",
    )

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise PerftrainError(f"prefetch.factor is 1 or more; it was {self.factor}. Try opt.prefetch.factor=4.")

    def unfit(self, workload: Mapping[str, object]) -> str:
        return "the loader has no worker processes; try +opt=[workers,prefetch]" if workload.get("workers") == 0 else ""

    def predict(self, now: StepBreakdown) -> Gain:
        share = now.share("data_wait")
        return Gain.from_share(share, 1.0, 1.5, f"waiting for data is {share:.0%} of the step; only unevenness goes away")

    def loader(self, options: LoaderOptions) -> LoaderOptions:
        return replace(options, prefetch_factor=self.factor)
