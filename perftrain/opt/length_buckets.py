"""Batches of samples that are about as long: less padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler, default_collate

from perftrain.data import lengths
from perftrain.facts import Bottleneck, Card, Gain, Numerics, PerftrainError, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import LoaderOptions

SAYS_LENGTHS = "Give the dataset an attribute `lengths` (one whole number for each sample), or leave the switch out."


@dataclass(frozen=True)
class LengthBuckets(Switch):
    """Sort ``bucket_batches`` batches' worth of the shuffled order by length, and cut batches from that, in random order.

    Pays where sequences of very different length are padded to the longest of their batch and the model computes on the
    padding. Not where batches are padded to one fixed length, nor where length tells much about content: samples of a batch
    are then alike, and gradients scatter more from step to step (fewer ``bucket_batches`` mix more). Every sample comes once
    per epoch, as before. Shapes change from batch to batch as much as before: compile with ``dynamic=true``.

    The dataset must say its lengths: an attribute ``lengths``, or a plain list of samples.
    """

    bucket_batches: int = 50

    card: ClassVar[Card] = Card(
        name="length_buckets",
        summary="batches of samples that are about as long, so that less is padding",
        place=Place.LOADER,
        numerics=Numerics.CLOSE,
        relieves=(Bottleneck.PADDING_WASTE,),
        requires=("a DataLoader that pads, with a dataset that has `lengths`",),
        conflicts=("packing",),
        cost="the samples of a batch are alike: gradients scatter more from step to step",
    )

    def __post_init__(self) -> None:
        if isinstance(self.bucket_batches, bool) or not isinstance(self.bucket_batches, int) or self.bucket_batches < 2:
            raise PerftrainError(
                f"length_buckets.bucket_batches is a whole number, 2 or more; it was {self.bucket_batches!r}. "
                "Try opt.length_buckets.bucket_batches=50."
            )

    def unfit(self, workload: Mapping[str, Any]) -> str:
        share = workload.get("padding_share", 1.0)
        if share is None:
            return "the dataset does not say how long its samples are (attribute `lengths`)"
        return f"{share:.1%} of a batch is padding" if share < 0.01 else ""

    def predict(self, now: StepBreakdown) -> Gain:
        share = now.share("forward", "backward")
        because = f"forward and backward are {share:.0%} of the step; what they spend on padding vanishes, often half of a shuffled batch"
        return Gain.from_share(share, 1.0, 3.0, because)

    def loader(self, options: LoaderOptions) -> LoaderOptions:
        found = self._lengths(options)
        sampler = options.sampler
        if sampler is None:
            shuffled = RandomSampler(options.dataset, generator=options.generator) if options.shuffle else None
            sampler = shuffled or SequentialSampler(options.dataset)
        assert options.batch_size is not None
        buckets = lengths.LengthBuckets(
            sampler,
            found,
            options.batch_size,
            self.bucket_batches,
            drop_last=options.drop_last,
            shuffle=not isinstance(sampler, SequentialSampler),
            generator=options.generator,
        )
        return replace(options, batch_sampler=buckets, batch_size=1, shuffle=None, sampler=None, drop_last=False)

    def _lengths(self, options: LoaderOptions) -> Any:
        """The lengths, or why there is nothing to do.

        Raises:
            PerftrainError: no padding, no index, no lengths, or batches that somebody else makes.
        """
        name = type(options.dataset).__name__
        if options.batch_sampler is not None or options.batch_size is None:
            raise PerftrainError(
                "length_buckets decides which samples make a batch; this loader has a batch_sampler or no batch_size. "
                "Give it batch_size=..., or leave the switch out."
            )
        if options.dataset is None:
            raise PerftrainError("length_buckets changes which samples make a batch; this loader is no DataLoader. Leave the switch out.")
        if isinstance(options.dataset, IterableDataset) or not hasattr(options.dataset, "__len__"):
            raise PerftrainError(f"length_buckets needs a dataset with an index and a length; {name} has none. Leave the switch out.")
        if options.collate_fn is None or options.collate_fn is default_collate:
            raise PerftrainError(
                "length_buckets makes batches with less padding; this loader's collate_fn does not pad (it stacks samples of one size). "
                "Leave the switch out."
            )
        found = lengths.lengths_of(options.dataset)
        if found is None:
            raise PerftrainError(f"length_buckets must know how long each sample is; {name} does not say. {SAYS_LENGTHS}")
        if len(found) and min(found) == max(found):
            raise PerftrainError(f"length_buckets needs samples of different length; all of {name} are {min(found)}. Leave the switch out.")
        return found
