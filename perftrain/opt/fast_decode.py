"""Decode only what the random crop needs: reduced-scale JPEG decoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, ClassVar

from perftrain.data.augmentation import read_augmentation
from perftrain.data.decoders import CropDecoder, require_plain_decoder
from perftrain.data.image_folder import with_folder
from perftrain.facts import Bottleneck, Card, Gain, Numerics, PerftrainError, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import LoaderOptions, Plan


@dataclass(frozen=True)
class FastDecode(Switch):
    """Draw the crop first, from the size in the file's header; let libjpeg decode at 1/2, 1/4 or 1/8 of the size, as small as the
    crop allows; then crop and scale.

    Pays where JPEGs are much larger than what the network sees, and decoding is what a step waits for. Not where crops are as
    large as the images (nothing to leave out), nor for PNG. The crops are the same ones; their pixels differ a little, since
    libjpeg scales them instead of PIL. Acts on a dataset with ImageFolder's attributes whose transform begins with
    RandomResizedCrop. Source: Pillow documentation, ``Image.draft``.
    """

    card: ClassVar[Card] = Card(
        name="fast_decode",
        summary="decode JPEGs at the smallest scale that the random crop allows",
        place=Place.DATASET,
        numerics=Numerics.CLOSE,
        relieves=(Bottleneck.INPUT_DECODE, Bottleneck.INPUT_WORKERS),
        requires=("a dataset of image files", "torchvision transforms that begin with RandomResizedCrop"),
        conflicts=("decode_cache", "gpu_decode", "transforms_v2"),
        cost="pixels differ a little from PIL's own scaling",
    )

    def unavailable(self, plan: Plan) -> str:
        return "" if find_spec("torchvision") else "it needs torchvision; try: pip install torchvision"

    def unfit(self, workload: Mapping[str, Any]) -> str:
        return "the dataset is no folder of image files" if workload.get("image_files") is False else ""

    def predict(self, now: StepBreakdown) -> Gain:
        share = now.share("data_wait")
        return Gain.from_share(share, 1.0, 3.0, f"{share:.0%} of the step waits for data; decoding is a part of that")

    def loader(self, options: LoaderOptions) -> LoaderOptions:
        def change(folder: Any) -> None:
            require_plain_decoder(folder.loader, "fast_decode")
            augmentation = read_augmentation(folder.transform, "fast_decode")
            if augmentation.crop is None:
                raise PerftrainError(
                    "fast_decode leaves out what a random crop does not need, and the transform has no RandomResizedCrop. "
                    "Leave +opt=fast_decode out."
                )
            folder.loader, folder.transform = CropDecoder(augmentation.crop), replace(augmentation, crop=None)

        return replace(options, dataset=with_folder(options.dataset, "fast_decode", change))
