"""Decoded images kept in memory or on disk: each file is decoded once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from perftrain.data.image_folder import require_folder, with_folder
from perftrain.data.pixel_cache import PixelCache
from perftrain.data.scratch import scratch_folder
from perftrain.facts import Bottleneck, Card, Gain, Numerics, PerftrainError, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import LoaderOptions

WHERE = ("ram", "disk")


@dataclass(frozen=True)
class DecodeCache(Switch):
    """Decode every file once and keep the pixels for all epochs, all loader workers and all processes on this machine.

    Pays for several epochs over a data set whose decoded images fit: a 500 x 375 photograph takes 0.5 MB. Not for a single epoch,
    nor for data sets of terabytes. ``fill`` decodes everything before the first step, on all cores; that is part of the warm-up
    that the verdict gives beside the gain. Without it the first epoch fills it. ``limit_bytes``: None is 80 % of what is free.
    """

    where: str = "ram"
    fill: bool = True
    limit_bytes: int | None = None

    card: ClassVar[Card] = Card(
        name="decode_cache",
        summary="decode every image once; keep the pixels in memory or on disk",
        place=Place.DATASET,
        numerics=Numerics.EXACT,
        relieves=(Bottleneck.INPUT_DECODE, Bottleneck.INPUT_STORAGE, Bottleneck.INPUT_WORKERS),
        requires=("a dataset of image files",),
        conflicts=("dali", "fast_decode", "gpu_decode", "local_copy"),
        cost="three bytes a pixel, and decoding everything before the first step",
    )

    def __post_init__(self) -> None:
        if self.where not in WHERE:
            raise PerftrainError(
                f"decode_cache.where is one of {', '.join(WHERE)}; it was {self.where!r}. Try opt.decode_cache.where=disk."
            )
        if self.limit_bytes is not None and self.limit_bytes < 1:
            raise PerftrainError(
                f"decode_cache.limit_bytes is 1 or more; it was {self.limit_bytes}. Try opt.decode_cache.limit_bytes=null."
            )

    def unfit(self, workload: Mapping[str, Any]) -> str:
        return "the dataset is no folder of image files" if workload.get("image_files") is False else ""

    def predict(self, now: StepBreakdown) -> Gain:
        share = now.share("data_wait")
        return Gain.from_share(share, 1.0, 4.0, f"{share:.0%} of the step waits for data; reading and decoding are a part of that")

    def loader(self, options: LoaderOptions) -> LoaderOptions:
        folder = require_folder(options.dataset, "decode_cache")
        other = "disk" if self.where == "ram" else "ram"
        advice = f"Try opt.decode_cache.where={other}, or leave +opt=decode_cache out."
        parent = scratch_folder("decode_cache", in_memory=self.where == "ram")
        cache = PixelCache(folder.loader, [path for path, *_ in folder.samples], parent)
        cache.make(self.limit_bytes, self.fill, advice)
        return replace(options, dataset=with_folder(options.dataset, "decode_cache", lambda found: setattr(found, "loader", cache)))
