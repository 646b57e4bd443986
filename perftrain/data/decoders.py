"""From a file to an image: to a tensor, only the part that is cropped, or not at all yet.

Each of them, called with a path, takes the place of a dataset's ``loader``; what it cannot read it raises on, also a file
that ends early.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from perftrain.data import images
from perftrain.data.augmentation import Augmentation, Crop, as_tensor, resized_crop
from perftrain.facts import PerftrainError

JPEG = b"\xff\xd8"
SCALES = (8, 4, 2)
"""What libjpeg can divide both sides by while it decodes."""


def require_plain_decoder(loader: Any, switch: str) -> None:
    """Refuse to replace a loader that does more, or other, than decode the file to RGB."""
    if loader is images.decode:
        return
    from torchvision.datasets import folder

    if loader not in (folder.default_loader, folder.pil_loader):
        name = getattr(loader, "__qualname__", None) or type(loader).__name__
        raise PerftrainError(
            f"{switch} decodes the files itself, in place of torchvision's default_loader or perftrain's; the dataset's loader is "
            f"{name}, which may do more than that. Leave +opt={switch} out, or give the dataset the default loader."
        )


def decode_tensor(path: str) -> Tensor:
    """uint8 (3, height, width) through torchvision's libjpeg-turbo; files that are no JPEG through PIL."""
    from torchvision.io import ImageReadMode, decode_jpeg

    data = np.fromfile(path, dtype=np.uint8)
    if data[:2].tobytes() != JPEG:
        return as_tensor(images.decode(path))
    image = decode_jpeg(torch.from_numpy(data), mode=ImageReadMode.RGB)
    assert isinstance(image, Tensor)
    return image


@dataclass(frozen=True)
class CropDecoder:
    """Draw the crop from the size in the header, then decode at the smallest scale that still has its pixels."""

    crop: Crop

    def __call__(self, path: str) -> Image.Image:
        with open(path, "rb") as file:
            image = Image.open(file)
            box = self.crop.draw(image)
            scale = drafted(image, box[2] // self.crop.size[0], box[3] // self.crop.size[1])
            image = image.convert("RGB")
        if scale == 1:
            return resized_crop(image, box, self.crop)
        top, left, height, width = (side / scale for side in box)
        return image.resize(
            (self.crop.size[1], self.crop.size[0]), pil_filter(self.crop.interpolation), (left, top, left + width, top + height)
        )


def drafted(image: Image.Image, *at_most: int) -> int:
    """Have an opened JPEG decoded at 1/2, 1/4 or 1/8 of its size, whichever is the smallest allowed; which one it was."""
    before = image.size
    for scale in SCALES:
        if scale <= min(at_most):
            image.draft(None, (before[0] // scale, before[1] // scale))
            return scale if image.size != before else 1
    return 1


def pil_filter(interpolation: Any) -> Image.Resampling:
    from torchvision.transforms.functional import pil_modes_mapping

    return Image.Resampling(pil_modes_mapping[interpolation])


@dataclass(frozen=True)
class Shrunk:
    """Decode, and scale down until the shorter side has ``side`` pixels; smaller images stay as they are."""

    side: int

    def __call__(self, path: str) -> Image.Image:
        with open(path, "rb") as file:
            image = Image.open(file)
            size = self.size_of(image.size)
            drafted(image, image.size[0] // size[0])
            image = image.convert("RGB")
        return image if image.size == size else image.resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0)

    def size_of(self, size: tuple[int, int]) -> tuple[int, int]:
        """(width, height) of what becomes of an image of ``size``."""
        factor = min(1.0, self.side / min(size))
        return max(1, round(size[0] * factor)), max(1, round(size[1] * factor))


# --- decoded on the device ---
class Undecoded(NamedTuple):
    """A JPEG file and what is to become of it."""

    data: Tensor
    """uint8, its bytes."""
    box: tuple[int, int, int, int]
    flip: bool


@dataclass(frozen=True)
class ReadForDevice:
    """Path -> :class:`Undecoded`: read the bytes, draw crop and flip from the size in the header."""

    augmentation: Augmentation

    def __call__(self, path: str) -> Undecoded:
        data = np.fromfile(path, dtype=np.uint8)
        if data[:2].tobytes() != JPEG:
            raise PerftrainError(f"gpu_decode reads JPEG files only; {path} is none. Leave +opt=gpu_decode out.")
        if data.tobytes().rfind(b"\xff\xd9") < data.tobytes().rfind(b"\xff\xda"):  # no end after the last scan began
            raise OSError("image file is truncated")
        with open(path, "rb") as file:
            image = Image.open(file)
            crop, flip = self.augmentation.crop, self.augmentation.flip
            box = crop.draw(image) if crop else (0, 0, image.size[1], image.size[0])
        return Undecoded(torch.from_numpy(data), box, flip is not None and bool(torch.rand(1) < flip))


class UndecodedBatch:
    """Files that stay in host memory, where the decoder wants them: nothing copies it, since it has no ``to``."""

    def __init__(self, files: list[Undecoded]) -> None:
        self.files = files


def collate_undecoded(samples: list[tuple[Undecoded, Any]]) -> tuple[UndecodedBatch, Tensor]:
    return UndecodedBatch([file for file, _ in samples]), torch.tensor([label for _, label in samples])


@dataclass(frozen=True)
class DecodeOnDevice:
    """(:class:`UndecodedBatch`, targets on the device) -> [images (N, C, H, W), targets]."""

    augmentation: Augmentation

    def __call__(self, batch: Any) -> list[Any]:
        from torchvision.io import ImageReadMode, decode_jpeg

        found, targets = batch
        decoded = decode_jpeg([file.data for file in found.files], mode=ImageReadMode.RGB, device=str(targets.device))
        assert isinstance(decoded, list)
        parts = []
        for image, file in zip(decoded, found.files, strict=True):
            crop = self.augmentation.crop
            part = resized_crop(image, file.box, crop) if crop else image
            parts.append(part.flip(-1) if file.flip else part)
        return [self.augmentation.finished(torch.stack(parts)), targets]
