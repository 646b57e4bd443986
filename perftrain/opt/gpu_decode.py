"""Decode JPEGs on the GPU (nvJPEG through torchvision)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, ClassVar

from perftrain.data.augmentation import read_augmentation
from perftrain.data.decoders import DecodeOnDevice, ReadForDevice, collate_undecoded, require_plain_decoder
from perftrain.data.image_folder import require_folder, set_transform, with_folder
from perftrain.facts import Bottleneck, Card, Gain, Numerics, PerftrainError, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import LoaderOptions, Plan


@dataclass(frozen=True)
class GPUDecode(Switch):
    """The loader reads bytes and draws crops; the GPU decodes, crops, scales, flips and normalizes.

    Pays where CPU cores that decode are what a step waits for and the GPU has time to spare. Not where the GPU is busy already:
    decoding then competes with training. JPEG files only. Source: torchvision documentation, ``decode_jpeg``.
    """

    card: ClassVar[Card] = Card(
        name="gpu_decode",
        summary="decode and augment JPEGs on the GPU (nvJPEG)",
        place=Place.DATASET,
        numerics=Numerics.CLOSE,
        relieves=(Bottleneck.INPUT_DECODE, Bottleneck.INPUT_WORKERS),
        requires=("a CUDA device", "a dataset of JPEG files", "torchvision transforms that it knows"),
        conflicts=("dali", "decode_cache", "device_augment", "fast_decode", "transforms_v2"),
        cost="time and memory of the GPU in every step",
    )

    def unavailable(self, plan: Plan) -> str:
        if plan.device.type != "cuda":
            return f"nvJPEG decodes on a CUDA device; this run is on {plan.device.type}."
        return "" if find_spec("torchvision") else "it needs torchvision; try: pip install torchvision"

    def unfit(self, workload: Mapping[str, Any]) -> str:
        return "the dataset is no folder of image files" if workload.get("image_files") is False else ""

    def predict(self, now: StepBreakdown) -> Gain:
        share = now.share("data_wait")
        return Gain.from_share(share, 1.0, 4.0, f"{share:.0%} of the step waits for data; decoding on CPU cores is a part of that")

    def loader(self, options: LoaderOptions) -> LoaderOptions:
        augmentation = read_augmentation(require_folder(options.dataset, "gpu_decode").transform, "gpu_decode")
        if augmentation.crop is None:
            raise PerftrainError(
                "gpu_decode needs a RandomResizedCrop, so that images of a batch have one size. Leave +opt=gpu_decode out."
            )

        def change(folder: Any) -> None:
            require_plain_decoder(folder.loader, "gpu_decode")
            folder.loader = ReadForDevice(augmentation)
            set_transform(folder, None)

        dataset = with_folder(options.dataset, "gpu_decode", change)
        return replace(
            options, dataset=dataset, collate_fn=collate_undecoded, after_copy=(DecodeOnDevice(augmentation), *options.after_copy)
        )
