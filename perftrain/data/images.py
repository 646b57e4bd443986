"""Folders of labelled images, read one file at a time, with a rule for files that cannot be read."""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageFile
from torch.utils.data import Dataset

from perftrain.facts import PerftrainError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")
ON_ERROR = ("stop", "skip")


class UnreadableImage(PerftrainError):
    """An image that cannot be decoded, by name.

    A loader raises a worker's error again as ``type(error)(text with the worker's traceback)``: the traceback ends with
    the message, which is all that helps here.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message.rpartition("UnreadableImage: ")[2].strip())


@dataclass(frozen=True)
class ImageFiles:
    """The files of a labelled folder, listed once: ``samples`` holds (path, index into ``classes``), sorted."""

    root: str
    classes: tuple[str, ...]
    samples: tuple[tuple[str, int], ...]


def list_images(root: str | Path) -> ImageFiles:
    """List ``root/<class>/**/*.jpg`` (or another of ``SUFFIXES``); hidden files and folders are left out.

    Raises:
        PerftrainError: there is no such folder, no class folder in it, or a class without an image.
    """
    root = Path(root)
    if not root.is_dir():
        raise PerftrainError(f"An image folder must exist: {root} is not a folder. Type recipe.data.root=/path/to/images.")
    classes = tuple(sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith(".")))
    if not classes:
        loose = sum(path.suffix.lower() in SUFFIXES for path in root.iterdir())
        raise PerftrainError(
            f"An image folder holds one folder per class: {root} holds none, and {loose} images beside. "
            "Sort the images as <root>/<class>/name.jpg, or type recipe.data.root=/another/folder."
        )
    files = [_images_below(root / name) for name in classes]
    empty = [name for name, found in zip(classes, files, strict=True) if not found]
    if empty:
        raise PerftrainError(
            f"Every class folder needs an image ({', '.join(SUFFIXES)}): there is none in {root} for {', '.join(empty[:5])}"
            f"{' and more' if len(empty) > 5 else ''}. Remove empty folders, or type recipe.data.root=/another/folder."
        )
    return ImageFiles(str(root), classes, tuple((path, label) for label, found in enumerate(files) for path in found))


def changed_ns(root: Path) -> tuple[tuple[str, int], ...]:
    """When files were last added to or taken from each class folder: (path below ``root``, nanoseconds since 1970)."""
    classes = sorted(path for pattern in ("*", "train/*", "val/*") for path in root.glob(pattern) if path.is_dir())
    return tuple((str(path.relative_to(root)), path.stat().st_mtime_ns) for path in classes)


def train_and_held_out(root: str | Path) -> tuple[ImageFiles, ImageFiles]:
    """The files to train on and those to evaluate on; listed again only when a class folder has changed.

    ``root/train`` and ``root/val`` where both exist. Otherwise a tenth of all files is held out, chosen by a checksum of
    the name: the same files on every machine, and few change sides when files are added.

    Raises:
        PerftrainError: see :func:`list_images`; or the two parts have other classes, or there is only one file.
    """
    return _split(Path(root), changed_ns(Path(root)))


@lru_cache(maxsize=4)
def _split(root: Path, changed: tuple[tuple[str, int], ...]) -> tuple[ImageFiles, ImageFiles]:
    if (root / "train").is_dir() and (root / "val").is_dir():
        train, held_out = list_images(root / "train"), list_images(root / "val")
        if train.classes != held_out.classes:
            differ = sorted(set(train.classes) ^ set(held_out.classes))
            raise PerftrainError(f"train/ and val/ need the same class folders: in {root} these are in one only: {differ[:5]}.")
        return train, held_out
    files = list_images(root)
    if "train" in files.classes:  # read as classes, train/ and test/ would be two labels: a training that means nothing
        raise PerftrainError(f"A folder train/ needs val/ beside it: {root} holds {', '.join(files.classes)}. Rename or add val/.")
    if len(files.samples) < 2:
        raise PerftrainError(f"Training and evaluation need an image each: {root} holds 1. Type recipe.data.root=/another/folder.")
    by_name = sorted(files.samples, key=lambda sample: zlib.crc32(os.path.relpath(sample[0], root).encode()))
    held = set(by_name[: max(1, len(by_name) // 10)])
    return (
        replace(files, samples=tuple(sample for sample in files.samples if sample not in held)),
        replace(files, samples=tuple(sample for sample in files.samples if sample in held)),
    )


def decode(path: str) -> Image.Image:
    """The whole file as an RGB image. PIL raises on a file that ends early (a corrupt middle it decodes as it is)."""
    with open(path, "rb") as file:
        return Image.open(file).convert("RGB")


class JpegFolder(Dataset[tuple[Any, int]]):
    """Labelled images of a folder, as (transformed image, class index); the attributes are those of torchvision's ImageFolder.

    Args:
        files: a folder of class folders, or what :func:`list_images` made of one.
        transform: called on each decoded PIL image.
        on_error: for a file that cannot be decoded, ``"stop"`` raises; ``"skip"`` takes the next readable file in its place
            (image and label), names the file on stderr the first time, and counts it.
        loader: path -> image.

    Raises:
        UnreadableImage: from indexing, with ``on_error="stop"`` or if no file at all can be decoded.
    """

    def __init__(
        self,
        files: ImageFiles | str | Path,
        transform: Callable[[Any], Any] | None = None,
        on_error: str = "stop",
        loader: Callable[[str], Any] = decode,
    ) -> None:
        if on_error not in ON_ERROR:
            raise PerftrainError(f"on_error must be one of {', '.join(ON_ERROR)}: seen {on_error!r}. Type recipe.data.on_error=stop.")
        if ImageFile.LOAD_TRUNCATED_IMAGES:
            raise PerftrainError(
                "Files that end early must not be trained on unseen: PIL.ImageFile.LOAD_TRUNCATED_IMAGES is True, which pads "
                "them with grey. Set it to False, and leave such files out with recipe.data.on_error=skip."
            )
        if not isinstance(files, ImageFiles):
            files = list_images(files)
        self.root = files.root
        self.classes = list(files.classes)
        self.class_to_idx = {name: label for label, name in enumerate(files.classes)}
        self.samples = files.samples
        self.targets = [label for _, label in files.samples]
        self.transform = transform
        self.on_error = on_error
        self.loader = loader
        # One byte per file in shared memory, so that forked and spawned workers count into what the main process reads.
        # A flag is only ever raised: no lock is needed, and none can be left held by a worker that is killed.
        self._unreadable = torch.zeros(len(files.samples), dtype=torch.uint8).share_memory_()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        first = range(len(self))[index]
        for step in range(len(self)):
            place = (first + step) % len(self)
            path, label = self.samples[place]
            try:
                image = self.loader(path)
            except MemoryError:
                raise
            except Exception as error:  # PIL's decoders raise OSError, SyntaxError, ValueError, struct.error, ...
                self._unreadable_file(place, error)
            else:
                return (self.transform(image) if self.transform else image), label
        raise UnreadableImage(f"At least one image must be readable: none of {len(self)} in {self.root} is.")

    @property
    def skipped(self) -> int:
        """Files left out so far, each counted once, by all workers together."""
        return int(self._unreadable.sum())

    def _unreadable_file(self, place: int, error: Exception) -> None:
        path = self.samples[place][0]
        if self.on_error == "stop":
            raise UnreadableImage(
                f"Every image must be readable: {path} is not ({error}). Repair or remove it, or type "
                "recipe.data.on_error=skip to leave such files out, counted (in your own code: on_error='skip')."
            ) from error
        if not self._unreadable[place]:
            self._unreadable[place] = 1
            print(f"perftrain: skipped unreadable image {path} ({error})", file=sys.stderr, flush=True)


def _images_below(folder: Path) -> list[str]:
    found: list[str] = []
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [os.path.join(place, n) for n in names if n.lower().endswith(SUFFIXES) and not n.startswith(".")]
    return sorted(found)
