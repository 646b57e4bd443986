"""The dataset's transform on uint8 tensors instead of PIL images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, ClassVar

from perftrain.data.augmentation import read_augmentation
from perftrain.data.decoders import decode_tensor, require_plain_decoder
from perftrain.data.image_folder import set_transform, with_folder
from perftrain.data.pixel_cache import PixelCache
from perftrain.facts import Bottleneck, Card, Gain, Numerics, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import LoaderOptions, Plan


@dataclass(frozen=True)
class TransformsV2(Switch):
    """Decode to uint8 tensors (torchvision's libjpeg-turbo), crop and scale with torchvision.transforms.v2, float only at the end.

    Pays where the transform costs as much as the decoding. Not where PIL was built with SIMD, nor where most of a large image
    is thrown away (``fast_decode`` does not even decode that). Crops and flips are the same ones; interpolation rounds otherwise.
    Source: torchvision documentation, "Performance considerations" of transforms v2.
    """

    card: ClassVar[Card] = Card(
        name="transforms_v2",
        summary="decode and augment uint8 tensors (torchvision v2) instead of PIL images",
        place=Place.DATASET,
        numerics=Numerics.CLOSE,
        relieves=(Bottleneck.INPUT_DECODE, Bottleneck.INPUT_WORKERS),
        requires=("a dataset of image files", "torchvision transforms that it knows"),
        conflicts=("fast_decode", "gpu_decode"),
        cost="interpolation rounds otherwise than PIL's",
    )

    def unavailable(self, plan: Plan) -> str:
        return "" if find_spec("torchvision") else "it needs torchvision; try: pip install torchvision"

    def unfit(self, workload: Mapping[str, Any]) -> str:
        return "the dataset is no folder of image files" if workload.get("image_files") is False else ""

    def predict(self, now: StepBreakdown) -> Gain:
        share = now.share("data_wait")
        return Gain.from_share(share, 1.0, 1.5, f"{share:.0%} of the step waits for data; transforms are a part of that")

    def loader(self, options: LoaderOptions) -> LoaderOptions:
        def change(folder: Any) -> None:
            set_transform(folder, read_augmentation(folder.transform, "transforms_v2"))
            if isinstance(folder.loader, PixelCache):
                folder.loader = folder.loader.giving_tensors()
                return
            require_plain_decoder(folder.loader, "transforms_v2")
            folder.loader = decode_tensor

        return replace(options, dataset=with_folder(options.dataset, "transforms_v2", change))
