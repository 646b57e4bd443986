"""Several short sequences in one row: hardly any padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch.utils.data import default_collate

from perftrain.data.packing import Packed
from perftrain.facts import Bottleneck, Card, Gain, Numerics, PerftrainError, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import LoaderOptions


@dataclass(frozen=True)
class Packing(Switch):
    """Join the samples of each batch into as few rows as they fit in, the longest first, before they are padded and stacked.

    A batch holds the same samples as before, in fewer rows of the same structure; epochs, workers and shuffling are
    untouched. Pays where sequences of very different length are padded to the longest of their batch. Samples are tuples or
    dicts of 1-D tensors of one length, tokens and a target for each; others are refused.

    It changes the training: attention looks across the joints, and positions go on counting there, unless the model is told
    where texts begin (it gets nothing but longer rows). Targets that stand at their own input (``labels``) are masked at the
    joints. Not for models that read the whole row as one (classification), nor after length_buckets, which leaves no room.

    ``row_length``: positions of a row; None: as many as the batch's longest sample, which the model can hold in any case.
    A longer sample is not split: it has a row of its own. Longer rows hold less padding only in batches that fill several.

    Source: Krell et al., "Efficient Sequence Packing without Cross-contamination", 2021 (the packing; not its masks).
    """

    row_length: int | None = None

    card: ClassVar[Card] = Card(
        name="packing",
        summary="several short sequences in one row, so that hardly anything is padding",
        place=Place.LOADER,
        numerics=Numerics.CHANGED,
        relieves=(Bottleneck.PADDING_WASTE,),
        requires=("a DataLoader that pads sequences with a target for each position",),
        conflicts=("length_buckets",),
        cost="attention looks across the joints of a row",
    )

    def __post_init__(self) -> None:
        length = self.row_length
        if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
            raise PerftrainError(
                f"packing.row_length is a whole number above 0 or null; it was {length!r}. Try opt.packing.row_length=512."
            )

    def unfit(self, workload: Mapping[str, Any]) -> str:
        share = workload.get("padding_share")
        return f"{share:.1%} of a batch is padding" if share is not None and share < 0.01 else ""

    def predict(self, now: StepBreakdown) -> Gain:
        share = now.share("forward", "backward")
        because = f"forward and backward are {share:.0%} of the step; what they spend on padding vanishes, often half of a shuffled batch"
        return Gain.from_share(share, 1.0, 3.0, because)

    def loader(self, options: LoaderOptions) -> LoaderOptions:
        if options.dataset is None or options.batch_size is None:
            raise PerftrainError("packing joins the samples of a batch; this loader is given whole batches. Leave the switch out.")
        if options.collate_fn is None or options.collate_fn is default_collate:
            raise PerftrainError(
                "packing saves padding; this loader's collate_fn does not pad (it stacks samples of one size). Leave the switch out."
            )
        return replace(options, collate_fn=Packed(options.collate_fn, self.row_length))
