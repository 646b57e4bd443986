"""NVIDIA DALI in place of the DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar

from torch.utils.data import default_collate

from perftrain.cores import usable_cores
from perftrain.data.augmentation import read_augmentation
from perftrain.data.dali import DaliLoader, interpolation, settle_all
from perftrain.data.decoders import require_plain_decoder
from perftrain.data.image_folder import require_folder
from perftrain.facts import Bottleneck, Card, Gain, Numerics, PerftrainError, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import LoaderOptions, Plan


@dataclass(frozen=True)
class Dali(Switch):
    """A DALI pipeline reads, decodes only the crop, scales, flips and normalizes: on CPU threads, or with nvJPEG on a CUDA device.

    Pays where decoding is what a step waits for, most where cores are few or the GPU can decode. Not for small images, nor where
    loading is a few per cent of a step. Batches and their order are the DataLoader's; crops and flips are DALI's own, from the same
    distribution. ``threads``: None is the loader's workers, or else the cores. Batches are complete or dropped as before. A file that
    cannot be decoded ends the run (``on_error=skip`` is not supported). Source: NVIDIA DALI documentation.
    """

    threads: int | None = None
    prefetch: int = 2
    """Batches made ahead."""

    card: ClassVar[Card] = Card(
        name="dali",
        summary="load, decode and augment images with NVIDIA DALI",
        place=Place.LOADER_ENGINE,
        numerics=Numerics.CLOSE,
        relieves=(Bottleneck.INPUT_DECODE, Bottleneck.INPUT_WORKERS, Bottleneck.INPUT_COLLATE),
        requires=("nvidia-dali-cuda120", "a dataset of image files", "torchvision transforms that begin with RandomResizedCrop"),
        conflicts=(
            "decode_cache", "device_augment", "fast_decode", "gpu_decode", "in_order", "nodes", "persistent_workers", "stateful_loader",
            "transforms_v2",
        ),
        cost="a library of its own, threads and buffers",
    )  # fmt: skip

    def __post_init__(self) -> None:
        for name, value in (("threads", 1 if self.threads is None else self.threads), ("prefetch", self.prefetch)):
            if value < 1:
                raise PerftrainError(f"dali.{name} is 1 or more; it was {value}. Try opt.dali.{name}=2.")

    def unavailable(self, plan: Plan) -> str:
        missing = [name for name in ("nvidia.dali", "torchvision") if _missing(name)]
        return f"it needs {' and '.join(missing)}; try: pip install 'perftrain[dali,recipes]'" if missing else ""

    def unfit(self, workload: Mapping[str, Any]) -> str:
        return "the dataset is no folder of image files" if workload.get("image_files") is False else ""

    @contextmanager
    def process(self) -> Iterator[None]:  # type: ignore[override]
        try:
            yield
        finally:
            settle_all()  # while another arm has its turn, nothing is made ahead

    def predict(self, now: StepBreakdown) -> Gain:
        share = now.share("data_wait")
        return Gain.from_share(share, 1.0, 4.0, f"{share:.0%} of the step waits for data; decoding and transforms are a part of that")

    def loader(self, options: LoaderOptions) -> LoaderOptions:
        folder = require_folder(options.dataset, "dali")
        require_plain_decoder(folder.loader, "dali")
        augmentation = read_augmentation(folder.transform, "dali")
        if augmentation.crop is None:
            raise PerftrainError("dali decodes random crops, and the transform has no RandomResizedCrop. Leave +opt=dali out.")
        if options.collate_fn not in (None, default_collate):
            raise PerftrainError("dali makes batches itself; this loader has a collate_fn of its own. Leave +opt=dali out.")
        interpolation(augmentation.crop)
        cores = usable_cores()
        threads = self.threads or options.num_workers or cores
        engine = partial(_engine, augmentation=augmentation, threads=threads, prefetch=self.prefetch, device=options.device)
        return replace(options, engine=engine, num_workers=0, prefetch_factor=None)


def _engine(augmentation: Any, threads: int, prefetch: int, device: Any, **arguments: Any) -> DaliLoader:
    return DaliLoader(arguments, augmentation, threads, prefetch, device)


def _missing(name: str) -> bool:
    try:
        return find_spec(name) is None
    except ModuleNotFoundError:
        return True
