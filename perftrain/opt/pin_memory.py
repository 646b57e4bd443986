"""Batches in page-locked memory, from which a GPU copies faster and without stopping the program."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from perftrain.facts import Bottleneck, Card, Gain, Numerics, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import LoaderOptions, Plan


@dataclass(frozen=True)
class PinMemory(Switch):
    """``DataLoader(pin_memory=True)``: with workers a thread pins each batch, without them the program itself does.

    Pays for batches of megabytes on CUDA. Not for tiny batches, and not on a CPU, where nothing is copied. Batches of a class of
    your own need a ``pin_memory`` method. Source: PyTorch tutorial, "pin_memory and non_blocking".
    """

    card: ClassVar[Card] = Card(
        name="pin_memory",
        summary="batches in page-locked memory for faster copies to the GPU (CUDA)",
        place=Place.LOADER,
        numerics=Numerics.EXACT,
        relieves=(Bottleneck.INPUT_TRANSFER,),
        requires=("CUDA", "a DataLoader"),
        cost="page-locked memory for the batches in flight, and one more copy on the host",
    )

    def unavailable(self, plan: Plan) -> str:
        return "" if plan.device.type == "cuda" else f"it is for copies to CUDA devices; this one is {plan.device.type}."

    def predict(self, now: StepBreakdown) -> Gain:
        share = now.share("copy")
        return Gain.from_share(share, 1.0, 3.0, f"copying batches is {share:.0%} of the step")

    def loader(self, options: LoaderOptions) -> LoaderOptions:
        return replace(options, pin_memory=True)
