"""What is done to a decoded image, read from a Compose and done in other ways: with tensors, or in part on the device.

Every way draws the same random numbers in the same order as torchvision's transforms do (crop, then flip), so that with the
same generators all of them crop and flip alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from perftrain.facts import PerftrainError

Box = tuple[int, int, int, int]
"""Top, left, height, width, in pixels of the image as it is stored."""
Pair = tuple[tuple[float, ...], tuple[float, ...]]
KNOWN = "RandomResizedCrop, RandomHorizontalFlip, ToTensor (or PILToTensor/ToImage and ToDtype), Normalize, in this order"


@dataclass(frozen=True)
class Crop:
    """A random part of the image, scaled to ``size``: torchvision's RandomResizedCrop."""

    size: tuple[int, int]
    """Height and width of what comes out."""
    scale: tuple[float, float]
    ratio: tuple[float, float]
    interpolation: Any
    """torchvision's InterpolationMode."""

    def draw(self, image: Any) -> Box:
        """A box in a PIL image (its header suffices) or in a tensor (..., height, width)."""
        from torchvision.transforms import RandomResizedCrop

        return RandomResizedCrop.get_params(image, list(self.scale), list(self.ratio))


@dataclass(frozen=True)
class Augmentation:
    """A dataset's transform: image -> sample. A step that is None or False is left out."""

    crop: Crop | None = None
    flip: float | None = None
    """Probability of a horizontal flip."""
    to_float: bool = True
    """To float32 from 0 to 1; otherwise uint8 from 0 to 255."""
    normalize: Pair | None = None
    """Mean and standard deviation of each channel."""
    unfinished: bool = False
    """Leave all that follows the crop to :class:`Finish`, which does it to the whole batch."""

    def __call__(self, image: Any) -> Any:
        image = resized_crop(image, self.crop.draw(image), self.crop) if self.crop else image
        flip = self.flip is not None and bool(torch.rand(1) < self.flip)
        if self.unfinished:
            return Unfinished(as_tensor(image), flip)
        return self.finished(as_tensor(image, flip))

    def finished(self, image_CHW: Tensor) -> Tensor:
        image_CHW = image_CHW.contiguous()  # as ToTensor makes it: the layout of the batch is another switch's business
        if not self.to_float:
            return image_CHW
        found = image_CHW.to(torch.float32)
        for operation, value in constants(self.normalize, found.device):
            operation(found, value)
        return found


class Unfinished(NamedTuple):
    """An image after its crop, and whether it is to be flipped; collated, a batch of them."""

    image: Tensor
    """uint8."""
    flip: Any


@dataclass(frozen=True)
class Finish:
    """(``Unfinished``, targets) -> (images, targets): flip, float and normalize the whole batch where it lies."""

    augmentation: Augmentation

    def __call__(self, batch: Any) -> list[Any]:
        (images_NCHW, flip_N), targets = batch
        if self.augmentation.flip is not None:
            images_NCHW = torch.where(flip_N.view(-1, 1, 1, 1), images_NCHW.flip(-1), images_NCHW)
        return [self.augmentation.finished(images_NCHW), targets]


@lru_cache(maxsize=8)
def constants(normalize: Pair | None, device: torch.device) -> tuple[tuple[Callable[[Tensor, Tensor], Any], Tensor], ...]:
    """What makes uint8 values normalized floats, in place; the numbers are copied to the device once.

    They are tensors, since CUDA multiplies by the reciprocal of a number of Python's, which rounds otherwise than dividing.
    """
    mean, std = normalize or ((), ())
    steps = [(Tensor.div_, (255.0,)), *([(Tensor.sub_, mean), (Tensor.div_, std)] if normalize else [])]
    return tuple((operation, torch.tensor(values, dtype=torch.float32, device=device).view(-1, 1, 1)) for operation, values in steps)


def resized_crop(image: Any, box: Box, crop: Crop) -> Any:
    """The box of a PIL image or of a uint8 tensor (channels, height, width), scaled."""
    if isinstance(image, Tensor):
        from torchvision.transforms.v2 import functional as tensors

        return tensors.resized_crop(image, *box, size=list(crop.size), interpolation=crop.interpolation, antialias=True)
    from torchvision.transforms import functional

    return functional.resized_crop(image, *box, list(crop.size), crop.interpolation)


def as_tensor(image: Any, flip: bool = False) -> Tensor:
    """uint8, (channels, height, width), of a PIL image or a tensor; mirrored if ``flip``."""
    if isinstance(image, Tensor):
        return (image.flip(-1) if flip else image).contiguous()
    if image.mode == "RGB":  # one copy, where turning, converting and reordering would be three
        pixels_HWC = np.asarray(image)[:, :: -1 if flip else 1]
        return torch.from_numpy(np.array(pixels_HWC.transpose(2, 0, 1), order="C"))
    from torchvision.transforms import functional

    return functional.pil_to_tensor(functional.hflip(image) if flip else image).contiguous()


# --- reading a transform ---
def read_augmentation(transform: Any, switch: str) -> Augmentation:
    """The description of ``transform``: a Compose of torchvision's transforms (v1 or v2), or what another switch made of one.

    Raises:
        PerftrainError: it has a step that is not known, or not in the usual order.
    """
    if isinstance(transform, Augmentation):
        return transform
    found, reached = Augmentation(to_float=False), 0
    for step in flattened(transform):
        reader, place = READERS.get(type(step).__name__, (None, 0))
        changed = reader(step, found) if reader and type(step).__module__.startswith("torchvision.transforms") else None
        if changed is None or place < reached:
            what = "is not known to it" if changed is None else "comes too late"
            raise PerftrainError(
                f"{switch} does the dataset's transform in another way and knows {KNOWN}; {step} {what}. "
                f"Leave +opt={switch} out, or do that step elsewhere."
            )
        found, reached = changed, place
    if not found.to_float and found.normalize:
        raise PerftrainError(f"{switch}: Normalize needs floats, and the transform {transform} makes none. Add ToTensor.")
    return found


def flattened(transform: Any) -> list[Any]:
    inner = getattr(transform, "transforms", None)
    if type(transform).__name__ == "Compose" and isinstance(inner, Sequence):
        return [step for part in inner for step in flattened(part)]
    return [transform]


def _crop(step: Any, found: Augmentation) -> Augmentation | None:
    if getattr(step, "antialias", True) is False:
        return None
    size, scale, ratio = tuple(step.size), tuple(step.scale), tuple(step.ratio)
    return replace(found, crop=Crop((int(size[0]), int(size[1])), scale, ratio, step.interpolation))  # type: ignore[arg-type]


def _to_dtype(step: Any, found: Augmentation) -> Augmentation | None:
    return replace(found, to_float=True) if step.dtype is torch.float32 and step.scale else None


def _normalize(step: Any, found: Augmentation) -> Augmentation:
    return replace(found, normalize=(tuple(map(float, step.mean)), tuple(map(float, step.std))))


READERS: Mapping[str, tuple[Callable[[Any, Augmentation], Augmentation | None], int]] = {
    "RandomResizedCrop": (_crop, 1),
    "RandomHorizontalFlip": (lambda step, found: replace(found, flip=float(step.p)), 2),
    "ToTensor": (lambda step, found: replace(found, to_float=True), 3),
    "PILToTensor": (lambda step, found: found, 3),
    "ToImage": (lambda step, found: found, 3),
    "ToDtype": (_to_dtype, 4),
    "Normalize": (_normalize, 5),
}
"""Name of the transform -> what it adds to the description (None: these arguments are not known), and its place in the order."""
