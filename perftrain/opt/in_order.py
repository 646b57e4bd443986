"""Take batches as they get ready, not in the order in which they were asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from perftrain.facts import Bottleneck, Card, Gain, Numerics, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import LoaderOptions


@dataclass(frozen=True)
class InOrder(Switch):
    """``DataLoader(in_order=False)``: one slow batch no longer holds back those that other workers have ready.

    Pays with several workers and batches that take very unequal times. Not with one worker. Each epoch still has every sample
    once, but which batch comes when depends on timing: runs do not repeat themselves bit for bit, and slow samples tend to come
    late. Source: PyTorch documentation, DataLoader.
    """

    card: ClassVar[Card] = Card(
        name="in_order",
        summary="off: batches come as loader workers have them ready, not in order",
        place=Place.LOADER,
        numerics=Numerics.CLOSE,
        relieves=(Bottleneck.INPUT_WORKERS, Bottleneck.INPUT_STORAGE),
        requires=("a DataLoader with workers",),
        conflicts=("stateful_loader",),
        cost="runs no longer repeat themselves",
    )

    def unfit(self, workload: Mapping[str, object]) -> str:
        return "the loader has no worker processes; try +opt=[workers,in_order]" if workload.get("workers") == 0 else ""

    def predict(self, now: StepBreakdown) -> Gain:
        share = now.share("data_wait")
        return Gain.from_share(share, 1.0, 1.5, f"waiting for data is {share:.0%} of the step; only unevenness goes away")

    def loader(self, options: LoaderOptions) -> LoaderOptions:
        return replace(options, in_order=False)
