"""Keep the loader's worker processes alive from epoch to epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from perftrain.facts import Bottleneck, Card, Gain, Numerics, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import LoaderOptions


@dataclass(frozen=True)
class PersistentWorkers(Switch):
    """Workers are started once, not at every epoch (``DataLoader(persistent_workers=True)``).

    Pays for short epochs, and where starting a worker is dear (a dataset that opens files or copies itself). Not where an epoch
    takes minutes. Workers keep the dataset as it was when they started: what the program changes in it later does not reach them.
    From the second epoch on torch draws one random number less, so the order of the samples is another (as good) shuffle.
    """

    card: ClassVar[Card] = Card(
        name="persistent_workers",
        summary="loader workers live on from epoch to epoch",
        place=Place.LOADER,
        numerics=Numerics.CLOSE,
        relieves=(Bottleneck.INPUT_WORKER_RESTART,),
        requires=("a DataLoader with workers",),
        cost="the workers' memory also between epochs",
    )

    def unfit(self, workload: Mapping[str, object]) -> str:
        return "the loader has no worker processes; try +opt=[workers,persistent_workers]" if workload.get("workers") == 0 else ""

    def predict(self, now: StepBreakdown) -> Gain:
        share = now.share("data_wait")
        return Gain.from_share(share, 1.0, 2.0, f"waiting for data is {share:.0%} of the step; starting workers is a part of that")

    def loader(self, options: LoaderOptions) -> LoaderOptions:
        return replace(options, persistent_workers=True)
