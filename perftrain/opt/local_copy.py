"""Files copied to fast local storage before the first step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from perftrain.data.copies import local_copies
from perftrain.data.image_folder import require_folder, set_paths, with_folder
from perftrain.data.scratch import scratch_folder
from perftrain.facts import Bottleneck, Card, Gain, Numerics, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import LoaderOptions


@dataclass(frozen=True)
class LocalCopy(Switch):
    """Copy the dataset's files to ``folder`` (None: the temporary folder) and read them there.

    Pays where files lie on network storage that answers late, and are read for several epochs. Not where they are on a local
    disk, nor where the page cache of this machine already holds them. What is there already, by size and time, is not copied again.
    """

    folder: str | None = None

    card: ClassVar[Card] = Card(
        name="local_copy",
        summary="copy the dataset's files to fast local storage before the first step",
        place=Place.DATASET,
        numerics=Numerics.EXACT,
        relieves=(Bottleneck.INPUT_STORAGE,),
        requires=("a dataset of files",),
        conflicts=("decode_cache",),
        cost="the space, and the time of copying before the first step",
    )

    def unfit(self, workload: Mapping[str, Any]) -> str:
        return "the dataset is no folder of image files" if workload.get("image_files") is False else ""

    def predict(self, now: StepBreakdown) -> Gain:
        share = now.share("data_wait")
        return Gain.from_share(share, 1.0, 4.0, f"{share:.0%} of the step waits for data; slow storage may be all of that, or nothing")

    def loader(self, options: LoaderOptions) -> LoaderOptions:
        paths = [path for path, *_ in require_folder(options.dataset, "local_copy").samples]
        folder = Path(self.folder).expanduser() if self.folder else scratch_folder("local_copy")
        copies = local_copies(paths, folder)
        return replace(options, dataset=with_folder(options.dataset, "local_copy", lambda found: set_paths(found, copies.__getitem__)))
