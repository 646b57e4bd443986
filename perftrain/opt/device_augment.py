"""Flip, float and normalize the whole batch on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, ClassVar

from perftrain.data.augmentation import Finish, read_augmentation
from perftrain.data.decoders import CropDecoder
from perftrain.data.image_folder import require_folder, set_transform, with_folder
from perftrain.facts import Bottleneck, Card, Gain, Numerics, PerftrainError, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import LoaderOptions, Plan


@dataclass(frozen=True)
class DeviceAugment(Switch):
    """The loader delivers uint8 images right after the random crop (a quarter of the bytes); the rest is done to the batch.

    Pays where loading or the copy to the device is what a step waits for, most with several workers (less to pass through
    shared memory). On a CPU the batch is finished by the training process itself: it gains what one pass over a batch gains over
    many over images. Crops and flips are the same ones.
    """

    card: ClassVar[Card] = Card(
        name="device_augment",
        summary="copy uint8 images; flip, float and normalize the whole batch on the device",
        place=Place.DATASET,
        numerics=Numerics.CLOSE,
        relieves=(Bottleneck.INPUT_TRANSFER, Bottleneck.INPUT_WORKERS, Bottleneck.INPUT_COLLATE),
        requires=("a dataset of image files", "torchvision transforms with RandomResizedCrop"),
        conflicts=("dali", "gpu_decode"),
        cost="a little work of the device in every step",
    )

    def unavailable(self, plan: Plan) -> str:
        return "" if find_spec("torchvision") else "it needs torchvision; try: pip install torchvision"

    def unfit(self, workload: Mapping[str, Any]) -> str:
        return "the dataset is no folder of image files" if workload.get("image_files") is False else ""

    def predict(self, now: StepBreakdown) -> Gain:
        share = now.share("data_wait", "copy")
        return Gain.from_share(share, 1.0, 1.3, f"loading and copying are {share:.0%} of the step; float and normalize are a part of that")

    def loader(self, options: LoaderOptions) -> LoaderOptions:
        augmentation = read_augmentation(require_folder(options.dataset, "device_augment").transform, "device_augment")

        def change(folder: Any) -> None:
            if augmentation.crop is None and not isinstance(folder.loader, CropDecoder):
                raise PerftrainError(
                    "device_augment makes a batch of images after their crop, and the transform has no RandomResizedCrop to make them "
                    "of one size. Leave +opt=device_augment out."
                )
            set_transform(folder, replace(augmentation, unfinished=True))

        dataset = with_folder(options.dataset, "device_augment", change)
        return replace(options, dataset=dataset, after_copy=(*options.after_copy, Finish(augmentation)))
