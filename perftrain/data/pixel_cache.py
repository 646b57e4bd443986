"""Decoded images of a folder in one file that all processes map: decoding is paid once.

Two files in a folder of its own: ``pixels`` holds the images one after the other (uint8, height x width x 3), ``filled`` a
byte per image. An image's pixels are written first and its byte after them, with ``pwrite``; whoever reads the byte finds the
whole image. Writing an image twice writes the same bytes, so workers need no lock for it. Only making the folder takes one.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from filelock import FileLock
from PIL import Image
from torch import Tensor

from perftrain.cores import usable_cores
from perftrain.facts import PerftrainError

SHARE_OF_FREE = 0.8
"""What a cache may take of the memory or disk that is free."""


class PixelCache:
    """A ``loader`` (path -> image) that decodes each file at most once for all processes, those of other programs included.

    Args:
        decode: path -> RGB PIL image, or uint8 tensor (3, height, width); what comes out of the cache is of the same kind.
            Its ``size_of``, if it has one, says what size an image of some size in the file becomes.
        paths: of all files; others are decoded each time.
        parent: the cache's folder is made in here, or found if there is one of the same files and decoder.

    Raises:
        PerftrainError: it would not fit, or the decoder gives something else.
    """

    def __init__(self, decode: Callable[[str], Any], paths: Sequence[str], parent: Path) -> None:
        self.decode = decode
        self.rows = {path: row for row, path in enumerate(dict.fromkeys(paths))}
        self.tensors = _is_tensor(decode, paths)
        self.folder = parent / _key(decode, self.rows)
        self._opened: tuple[Any, Any, Any] | None = None

    # --- making it ---
    def make(self, limit_bytes: int | None, fill: bool, advice: str) -> None:
        """Make the folder, unless it is there; ``fill`` decodes everything now."""
        with FileLock(f"{self.folder}.lock"):
            if not self.folder.is_dir():
                self._allocate(limit_bytes, advice)
            if fill:
                self._fill()

    def _allocate(self, limit_bytes: int | None, advice: str) -> None:
        sizes = np.array(list(map(self._size, self.rows)), dtype=np.int64).reshape(-1, 2)
        ends = np.cumsum(3 * sizes[:, 0] * sizes[:, 1])
        total, free = int(ends[-1]), free_bytes(self.folder.parent)
        limit = int(SHARE_OF_FREE * free) if limit_bytes is None else limit_bytes
        if total > min(limit, free):
            share = f"{SHARE_OF_FREE:.0%} of the {free / 1e9:.2f} GB that are free"
            allowed = share if limit_bytes is None else f"{limit / 1e9:.2f} GB allowed"
            raise PerftrainError(
                f"A cache must fit: {len(sizes)} decoded images take {total / 1e9:.2f} GB, with {allowed} in {self.folder.parent}. {advice}"
            )
        partial = self.folder.with_name(f"{self.folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed: the lock is ours
        partial.mkdir(parents=True)
        np.save(partial / "sizes.npy", sizes)
        for name, size in (("pixels", total), ("filled", len(sizes))):
            _reserve(partial / name, size)
        os.rename(partial, self.folder)

    def _size(self, path: str) -> tuple[int, int]:
        """(height, width) in the cache; nothing for a file without a header: the decoder will say what is wrong with it."""
        try:
            with Image.open(path) as image:
                width, height = getattr(self.decode, "size_of", lambda size: size)(image.size)
        except (OSError, SyntaxError, ValueError):
            return 0, 0
        return height, width

    def _fill(self) -> None:
        def try_one(path: str) -> None:
            try:
                self._decode_into(path)
            except Exception:  # an unreadable file: met again, and then told, when it is trained on
                return

        filled = self._open()[2]
        missing = [path for path, row in self.rows.items() if not filled[row]]
        cores = usable_cores()
        with ThreadPoolExecutor(cores) as pool:  # decoders hold no lock of Python's
            for _ in pool.map(try_one, missing):
                pass

    # --- using it ---
    def __call__(self, path: str) -> Any:
        row = self.rows.get(path)
        if row is None:
            return self._given(self.decode(path))
        _, pixels, filled = self._open()
        if not filled[row]:
            return self._given(self._decode_into(path))
        array_HWC = self._slot(pixels, row)
        return torch.from_numpy(array_HWC).permute(2, 0, 1) if self.tensors else Image.fromarray(array_HWC)

    def giving_tensors(self) -> PixelCache:
        """The same cache, giving uint8 tensors (3, height, width)."""
        twin = PixelCache.__new__(PixelCache)
        twin.__dict__.update(self.__dict__, tensors=True)
        return twin

    @property
    def filled(self) -> int:
        """Images in it."""
        return int(np.count_nonzero(self._open()[2]))

    def _decode_into(self, path: str) -> Any:
        image, row = self.decode(path), self.rows[path]
        array_HWC = image.permute(1, 2, 0).contiguous().numpy() if isinstance(image, Tensor) else np.asarray(image)
        (starts, sizes), _, _ = self._open()
        if array_HWC.shape != (*sizes[row], 3):
            return image  # its header promised another size: decoded each time
        _write(self.folder / "pixels", array_HWC.tobytes(), int(starts[row]))
        _write(self.folder / "filled", b"\x01", row)
        return image

    def _given(self, image: Any) -> Any:
        if self.tensors and not isinstance(image, Tensor):
            return torch.from_numpy(np.array(image)).permute(2, 0, 1)
        return image

    def _slot(self, pixels: Any, row: int) -> np.ndarray:
        starts, sizes = self._open()[0]
        height, width = sizes[row]
        return pixels[starts[row] : starts[row] + 3 * height * width].reshape(height, width, 3)

    def _open(self) -> tuple[Any, Any, Any]:
        """((starts, sizes), pixels, filled), mapped once in each process. A write to the mapped pixels stays private."""
        if self._opened is None:
            sizes = np.load(self.folder / "sizes.npy")
            lengths = 3 * sizes[:, 0] * sizes[:, 1]
            places = (np.cumsum(lengths) - lengths, sizes)
            self._opened = (places, _mapped(self.folder / "pixels", mmap.ACCESS_COPY), _mapped(self.folder / "filled", mmap.ACCESS_READ))
        return self._opened

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}  # a process that is started anew maps for itself


def free_bytes(folder: Path) -> int:
    """What can be written there: what the file system has, and for one in memory also what the machine has."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    return min(free, psutil.virtual_memory().available) if folder.is_relative_to("/dev/shm") else free


def _is_tensor(decode: Callable[[str], Any], paths: Sequence[str]) -> bool:
    """The kind of image that ``decode`` gives, by the first file that it can read."""
    for path in paths:
        try:
            image = decode(path)
        except Exception:
            continue
        if isinstance(image, Tensor) and image.dtype is torch.uint8 and image.dim() == 3 and image.shape[0] == 3:
            return True
        if isinstance(image, Image.Image) and image.mode == "RGB":
            return False
        raise PerftrainError(
            f"A cache holds RGB images of 8 bits a channel; the dataset's loader gives {type(image).__name__} "
            f"{getattr(image, 'mode', getattr(image, 'dtype', ''))}. Leave the cache out."
        )
    return False


def _key(decode: Callable[[str], Any], paths: Sequence[str] | dict[str, int]) -> str:
    """Names the cache: another file, another state of one, or another decoder is another cache."""
    digest = hashlib.blake2b(digest_size=12)
    name = getattr(decode, "__qualname__", None)
    digest.update(f"{decode.__module__}.{name}".encode() if name else repr(decode).encode())
    for path in paths:
        state = os.stat(path)
        digest.update(f"{path}\0{state.st_size}\0{state.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def _reserve(path: Path, size: int) -> None:
    """A file of zeros whose room is certain: a mapped page that cannot be had would end the process."""
    with open(path, "wb") as file:
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)


def _write(path: Path, data: bytes, at: int) -> None:
    with open(path, "r+b", buffering=0) as file:
        while data:
            count = os.pwrite(file.fileno(), data, at)
            data, at = data[count:], at + count


def _mapped(path: Path, access: int) -> np.ndarray:
    with open(path, "rb" if access == mmap.ACCESS_READ else "r+b") as file:
        if not path.stat().st_size:
            return np.empty(0, np.uint8)
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=access), np.uint8)
