"""Another batch size, or the largest that fits the device's memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from perftrain.facts import Bottleneck, Card, Gain, Numerics, PerftrainError, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import LoaderOptions, Plan


@dataclass(frozen=True)
class BatchSize(Switch):
    """Train on ``size`` samples a step. None, on CUDA only: double the program's own size while two whole training steps fit the
    memory, together with all other switches and never above ``limit``.

    Pays where the device is not busy with the present size: launches, the optimizer and Python cost the same for any size. It is
    another training: the learning rate and the number of steps must follow (twice the batch: about twice the rate, with warm-up).
    Not where the step is saturated. The comparison is in time per sample. Source: Goyal et al. 2017, "Accurate, Large Minibatch SGD".
    """

    size: int | None = None
    limit: int | None = None

    card: ClassVar[Card] = Card(
        name="batch_size",
        summary="another batch size (CUDA: by default the largest that fits)",
        place=Place.LOADER,
        numerics=Numerics.CHANGED,
        relieves=(Bottleneck.LAUNCH_OVERHEAD, Bottleneck.HOST_PYTHON, Bottleneck.OPTIMIZER_STEP),
        requires=("a DataLoader that makes its own batches", "CUDA, where no size is given"),
        conflicts=("length_buckets", "packing"),
        cost="memory; fewer, larger steps, whose learning rate must be found anew",
    )

    def __post_init__(self) -> None:
        for name in ("size", "limit"):
            seen = getattr(self, name)
            if seen is not None and seen < 1:
                raise PerftrainError(f"batch_size.{name} is 1 or more; it was {seen}. Try opt.batch_size.{name}=64.")
        if self.size is not None and self.limit is not None:
            raise PerftrainError(
                f"batch_size.limit is for the search; size={self.size} leaves nothing to search. Try opt.batch_size.size={self.size} alone."
            )

    def unavailable(self, plan: Plan) -> str:
        if self.size is None and plan.device.type != "cuda":
            return f"memory of the {plan.device.type} has no hard edge to find the largest size by; give one: opt.batch_size.size=64"
        return ""

    def predict(self, now: StepBreakdown) -> Gain:
        share = now.share("forward", "backward", "optimizer")
        return Gain.from_share(share, 1.0, 1.5, f"computing is {share:.0%} of the step; costs of any size are shared by more samples")

    def loader(self, options: LoaderOptions) -> LoaderOptions:
        if options.batch_size is None or options.batch_sampler is not None:
            raise PerftrainError(
                "batch_size sets the size of batches that the DataLoader makes; this one has batches from its own sampler or dataset. "
                "Leave the switch out, or give DataLoader(batch_size=...)."
            )
        samples = len(options.dataset) if hasattr(options.dataset, "__len__") else None
        size = self.size if self.size is not None else self._largest(options, options.batch_size, samples)
        if samples is not None and options.drop_last and size > samples:
            raise PerftrainError(
                f"A batch has at most as many samples as the dataset; it has {samples} and batch_size.size={size} with drop_last. "
                f"Try opt.batch_size.size={samples}."
            )
        return replace(options, batch_size=size)

    def _largest(self, options: LoaderOptions, present: int, samples: int | None) -> int:
        """``present`` doubled as often as it fits."""
        if options.fits is None:
            raise PerftrainError("Nobody can try here which batch size fits (several ranks do not). Give one: opt.batch_size.size=64")
        most = min(n for n in (self.limit, samples, 1 << 30) if n is not None)
        size = present
        while 2 * size <= most and options.fits(self, 2 * size):
            size *= 2
        return size
