"""The ways to make a batch (N, 3, 96, 96), float32 and normalized, from the photos recipe's files, with one or two cores."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from run import BATCH_SIZE, SIDE
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import RandomResizedCrop

from perftrain.data.images import JpegFolder, train_and_held_out
from perftrain.data.photographs import photographs_folder
from perftrain.engine.assemble import build_loader
from perftrain.opt import all_switches
from perftrain_recipes.photos import MEAN, STD, train_transform


@dataclass(frozen=True)
class Way:
    title: str
    make: Callable[[int], Any]
    """cores -> what gives batches, epoch after epoch."""
    packages: tuple[str, ...] = ()

    def missing(self) -> str:
        absent = [name for name in self.packages if not _installed(name)]
        return f"not installed: {', '.join(absent)}" if absent else ""


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def data() -> JpegFolder:
    return JpegFolder(train_and_held_out(photographs_folder())[0], train_transform(SIDE))


def loader(dataset: Any, workers: int) -> DataLoader[Any]:
    return DataLoader(dataset, BATCH_SIZE, shuffle=True, drop_last=True, num_workers=workers, persistent_workers=workers > 0)


def plain(workers: Callable[[int], int]) -> Callable[[int], Any]:
    return lambda cores: loader(data(), workers(cores))


def switched(*names: str) -> Callable[[int], Any]:
    """The plain loader with perftrain's switches; as many workers as cores where there is more than one."""

    def make(cores: int) -> Any:
        switches = sorted((all_switches()[name]() for name in names), key=lambda switch: switch.card.place)
        workers = cores if cores > 1 and "dali" not in names else 0
        made, after_copy = build_loader(loader(data(), workers), switches)
        return Finished(made, after_copy)

    return make


class Finished:
    """Batches with what is done to them on the device (here: the CPU), so that all ways deliver the same."""

    def __init__(self, made: Any, after_copy: Any) -> None:
        self.made, self.after_copy = made, after_copy

    def __iter__(self) -> Any:
        for batch in self.made:
            for call in self.after_copy:
                batch = call(batch)
            yield batch


class ByHand(Dataset[Any]):
    """Another library decodes; the crop's box is torchvision's; crop, scale and flip are OpenCV's."""

    def __init__(self, decode: Callable[[bytes, int], Any], reduced: bool) -> None:
        self.samples, self.decode, self.reduced = data().samples, decode, reduced
        self.mean, self.std = (255 * np.array(v, np.float32) for v in (MEAN, STD))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        import cv2

        path, label = self.samples[index]
        with open(path, "rb") as file:
            content = file.read()
        times = 2 if self.reduced else 1  # half the size is what every crop of these files can do with
        pixels = self.decode(content, times)
        box = RandomResizedCrop.get_params(torch.empty(3, *pixels.shape[:2]), [0.08, 1.0], [3 / 4, 4 / 3])
        top, left, height, width = box
        crop = cv2.resize(pixels[top : top + height, left : left + width], (SIDE, SIDE), interpolation=cv2.INTER_AREA)
        if random.random() < 0.5:
            crop = crop[:, ::-1]
        return torch.from_numpy(((crop - self.mean) / self.std).transpose(2, 0, 1).copy()), label


def opencv(content: bytes, times: int) -> Any:
    import cv2

    cv2.setNumThreads(1)
    kind = cv2.IMREAD_REDUCED_COLOR_2 if times == 2 else cv2.IMREAD_COLOR
    return cv2.cvtColor(cv2.imdecode(np.frombuffer(content, np.uint8), kind), cv2.COLOR_BGR2RGB)


def simplejpeg(content: bytes, times: int) -> Any:
    from simplejpeg import decode_jpeg

    smaller = {"min_height": 375 // 2, "min_width": 500 // 2, "min_factor": 1.0} if times == 2 else {}
    return decode_jpeg(content, "RGB", fastdct=True, fastupsample=True, **smaller)


def by_hand(decode: Any, reduced: bool) -> Callable[[int], Any]:
    return lambda cores: loader(ByHand(decode, reduced), cores if cores > 1 else 0)


WAYS: dict[str, Way] = {
    "torch": Way("torch DataLoader, PIL, as many workers as cores (none with one)", plain(lambda cores: cores if cores > 1 else 0)),
    "torch-0": Way("torch DataLoader, PIL, no workers", plain(lambda cores: 0)),
    "torch-1": Way("torch DataLoader, PIL, 1 worker", plain(lambda cores: 1)),
    "transforms_v2": Way("perftrain transforms_v2", switched("transforms_v2")),
    "device_augment": Way("perftrain device_augment", switched("device_augment")),
    "fast_decode": Way("perftrain fast_decode", switched("fast_decode")),
    "fast_decode+device_augment": Way("perftrain fast_decode + device_augment", switched("fast_decode", "device_augment")),
    "decode_cache": Way("perftrain decode_cache (filled before)", switched("decode_cache")),
    "decode_cache+device_augment": Way("perftrain decode_cache + device_augment", switched("decode_cache", "device_augment")),
    "nodes": Way("perftrain nodes (torchdata.nodes, threads)", switched("nodes"), ("torchdata",)),
    "dali": Way("perftrain dali (NVIDIA DALI, CPU)", switched("dali"), ("nvidia.dali",)),
    "opencv": Way("OpenCV by hand", by_hand(opencv, False), ("cv2",)),
    "opencv-reduced": Way("OpenCV by hand, decoded at half size", by_hand(opencv, True), ("cv2",)),
    "simplejpeg": Way("simplejpeg and OpenCV by hand", by_hand(simplejpeg, False), ("simplejpeg", "cv2")),
    "simplejpeg-reduced": Way("simplejpeg and OpenCV by hand, decoded at half size", by_hand(simplejpeg, True), ("simplejpeg", "cv2")),
}  # fmt: skip
