"""NVIDIA DALI as a loader: batches, order and labels are those of torch's samplers; pixels are made by a DALI pipeline."""

from __future__ import annotations

import importlib
import re
from collections import deque
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from perftrain.data.augmentation import Augmentation, Crop
from perftrain.data.image_folder import samples_in_order
from perftrain.data.images import UnreadableImage
from perftrain.facts import PerftrainError

ATTEMPTS = 10
"""At a random crop, as torchvision's."""


ITERATED: WeakSet[DaliLoader] = WeakSet()
"""Loaders whose pipeline may be at work in the background."""


def settle_all() -> None:
    for loader in list(ITERATED):
        loader.settle()


class DaliLoader:
    """Batches (images, labels), every sample once an epoch, in the order that torch's DataLoader would visit them in.

    The same generators give the same order as a DataLoader with these arguments; samplers shard (``DistributedSampler``) and
    are told the epoch as always. The random crops and flips are DALI's own, seeded by ``torch.initial_seed()``.

    Args:
        arguments: those of a DataLoader. ``num_workers`` is the number of threads, if it is not 0.
        augmentation: crop, flip, float and normalize.
        threads: where ``num_workers`` is 0.
        prefetch: batches made ahead.
        device: a CUDA device decodes with nvJPEG and keeps the batches there; otherwise they are on the CPU.
    """

    def __init__(self, arguments: dict[str, Any], augmentation: Augmentation, threads: int, prefetch: int, device: torch.device) -> None:
        plain = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "worker_init_fn": None, "pin_memory": False}
        order: DataLoader[Any] = DataLoader(**{**arguments, **plain, "multiprocessing_context": None, "timeout": 0})
        if order.batch_sampler is None:
            raise PerftrainError("dali makes batches; the loader has batch_size=None. Give it a batch size, or leave +opt=dali out.")
        self.dataset, self.batch_sampler, self.sampler = order.dataset, order.batch_sampler, order.sampler
        self.generator, self.batch_size, self.drop_last = order.generator, order.batch_size, order.drop_last
        self.augmentation, self.prefetch, self.device = augmentation, prefetch, device
        self.threads = int(arguments.get("num_workers") or threads)
        self.seed = torch.initial_seed() % 2**31
        samples = samples_in_order(order.dataset)
        self._labels = torch.tensor([label for _, label in samples])
        self._paths = [path for path, _ in samples]
        self._names = [np.frombuffer(path.encode(), np.uint8) for path in self._paths]
        self._pipeline: Any = None
        self._running: deque[list[int]] = deque()
        """Indices of the batches that the pipeline is making."""
        self._ready: deque[list[Tensor]] = deque()
        self._resume: dict[str, Any] | None = None
        self._epoch: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[Tensor]]:
        resume, self._resume = self._resume, None
        order, start = self._order(resume), resume["batches"] if resume else 0
        batches = iter(order[start:])
        self._epoch["batches"] = start
        ITERATED.add(self)
        try:
            self._schedule(batches, self.prefetch)
            while self._running or self._ready:
                made = self._ready.popleft() if self._ready else self._take()
                self._schedule(batches, 1)
                self._epoch["batches"] += 1
                yield made
        finally:  # also when the consumer stops early: the next epoch starts with an empty pipeline
            self.settle()
            self._ready.clear()

    def settle(self) -> None:
        """Wait for the batches that are being made; they are kept, and nothing runs until one is asked for."""
        while self._running and self._pipeline is not None:
            self._ready.append(self._take())

    # --- going on in the middle of an epoch ---
    def state_dict(self) -> dict[str, Any]:
        """What :meth:`load_state_dict` needs to deliver the rest of this epoch: the same samples in the same order."""
        return dict(self._epoch)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration gives the batches after those that were delivered when ``state`` was taken (other crops)."""
        self._resume = dict(state)

    def _order(self, resume: dict[str, Any] | None) -> list[list[int]]:
        """The indices of every batch; drawn from the generators as a DataLoader does."""
        generator = self.generator if self.generator is not None else torch.default_generator
        before = generator.get_state()
        if resume:
            generator.set_state(resume["generator"])
        self._epoch = {"generator": generator.get_state()}
        torch.empty((), dtype=torch.int64).random_(generator=generator)  # a DataLoader draws its workers' seed first
        order = list(self.batch_sampler)
        if resume:
            generator.set_state(before)
        return order

    # --- the pipeline ---
    def _schedule(self, batches: Iterator[list[int]], count: int) -> None:
        for _ in range(count):
            indices = next(batches, None)
            if indices is None:
                return
            if self._pipeline is None:
                size = self.batch_size or 1
                self._pipeline = build_pipeline(self.augmentation, size, self.threads, self.prefetch, self.device, self.seed)
            self._pipeline.feed_input("paths", [self._names[i] for i in indices])
            self._pipeline._run_once()
            self._running.append(indices)

    def _take(self) -> list[Tensor]:
        """The oldest scheduled batch, copied out of DALI's buffers."""
        feed_ndarray = library("nvidia.dali.plugin.pytorch").feed_ndarray

        indices = self._running.popleft()
        try:
            (made,) = self._pipeline.share_outputs()
        except RuntimeError as error:
            self._pipeline = None
            self._running.clear()
            raise self._explained(error, indices) from error
        found = made.as_tensor()
        images = torch.empty(found.shape(), dtype=torch.float32 if self.augmentation.to_float else torch.uint8, device=self.device)
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        feed_ndarray(found, images, cuda_stream=stream)
        self._pipeline.release_outputs()
        return [images, self._labels[indices].to(self.device)]

    def _explained(self, error: RuntimeError, indices: list[int]) -> PerftrainError:
        number = re.search(r"sample #(\d+)", str(error))
        suspects = [indices[int(number[1])]] if number else [i for i in indices if not readable(self._paths[i])]
        if not suspects:
            return PerftrainError(f"dali stopped: {str(error).strip().splitlines()[-1]} Leave +opt=dali out.")
        return UnreadableImage(
            f"Every image must be readable: dali could not decode {self._paths[suspects[0]]}. Repair or remove it; or leave "
            "+opt=dali out and type recipe.data.on_error=skip, which dali cannot."
        )


def library(name: str) -> Any:
    """A module of DALI, which is an extra: loaded on first use."""
    return importlib.import_module(name)


def readable(path: str) -> bool:
    try:
        with Image.open(path) as image:
            image.load()
    except (OSError, SyntaxError, ValueError):
        return False
    return True


def build_pipeline(what: Augmentation, batch_size: int, threads: int, prefetch: int, device: torch.device, seed: int) -> Any:
    """Paths in, images (channels, height, width) out: decode only the crop, scale, flip, float, normalize."""
    dali = library("nvidia.dali")
    fn, pipeline_def, types = library("nvidia.dali.fn"), dali.pipeline_def, library("nvidia.dali.types")

    cuda = device.type == "cuda"
    crop = what.crop
    assert crop is not None, "images of different sizes make no batch"
    scale = 255.0 if what.to_float else 1.0
    mean, std = what.normalize or ((0.0,) * 3, (1.0,) * 3)

    @pipeline_def(
        batch_size=batch_size, num_threads=threads, seed=seed, prefetch_queue_depth=prefetch,
        device_id=(device.index or 0) if cuda else None,
    )  # fmt: skip
    def pipeline() -> Any:
        files = fn.io.file.read(fn.external_source(name="paths", device="cpu", ndim=1, dtype=types.UINT8))
        decoder = fn.decoders.image_random_crop
        images = decoder(
            files, device="mixed" if cuda else "cpu", output_type=types.RGB, adjust_orientation=False, num_attempts=ATTEMPTS,
            random_area=list(crop.scale), random_aspect_ratio=list(crop.ratio),
        )  # fmt: skip
        images = fn.resize(images, size=list(crop.size), interp_type=interpolation(crop), antialias=True)
        flip = fn.random.coin_flip(probability=what.flip or 0.0)
        return fn.crop_mirror_normalize(
            images, mirror=flip, output_layout="CHW", dtype=types.FLOAT if what.to_float else types.UINT8,
            mean=[scale * m for m in mean], std=[scale * s for s in std],
        )  # fmt: skip

    built = pipeline()
    built.build()
    return built


def interpolation(crop: Crop) -> Any:
    """DALI's name of torchvision's interpolation.

    Raises:
        PerftrainError: it has none that does the same.
    """
    types = library("nvidia.dali.types")

    names = {"nearest": types.INTERP_NN, "bilinear": types.INTERP_LINEAR, "bicubic": types.INTERP_CUBIC}
    name = getattr(crop.interpolation, "value", str(crop.interpolation))
    if name not in names:
        raise PerftrainError(f"dali scales by {', '.join(names)}; the transform's crop by {name}. Leave +opt=dali out.")
    return names[name]
