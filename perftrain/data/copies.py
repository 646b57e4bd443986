"""Copies of a dataset's files on faster storage."""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from perftrain.facts import PerftrainError

THREADS = 8
"""Copy at once: network storage answers each of them late and all of them together."""
SPARE = 0.05
"""Part of the free space that is left free."""


def local_copies(paths: Sequence[str], folder: Path) -> dict[str, str]:
    """Copy what is not there yet (by size and time of change); path -> path of its copy.

    Each copy appears whole or not at all, so that several processes may copy at once.

    Raises:
        PerftrainError: the files are below ``folder`` already, it cannot be written, or they do not fit.
    """
    above = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])
    place = folder / hashlib.blake2b(above.encode(), digest_size=6).hexdigest()
    if Path(above).is_relative_to(folder):
        raise PerftrainError(
            f"local_copy copies to another folder; the files are in {folder} already. Try opt.local_copy.folder=/other/folder."
        )
    copies = {path: str(place / os.path.relpath(os.path.abspath(path), above)) for path in paths}
    try:
        missing = [(source, copy) for source, copy in copies.items() if not _is_copy(source, copy)]
        _check_room([source for source, _ in missing], folder)
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(lambda pair: _copy(*pair), missing):
                pass
    except OSError as error:
        raise PerftrainError(f"local_copy could not copy {above} to {folder}: {error}. Try opt.local_copy.folder=/other/folder.") from error
    return copies


def _is_copy(source: str, copy: str) -> bool:
    try:
        found, wanted = os.stat(copy), os.stat(source)
    except FileNotFoundError:
        return False
    return (found.st_size, found.st_mtime_ns) == (wanted.st_size, wanted.st_mtime_ns)


def _check_room(sources: Sequence[str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    needed, free = sum(os.path.getsize(source) for source in sources), shutil.disk_usage(folder).free
    if needed > (1 - SPARE) * free:
        raise PerftrainError(
            f"Copies must fit: {len(sources)} files take {needed / 1e9:.2f} GB, and {folder} has {free / 1e9:.2f} GB free. "
            "Try opt.local_copy.folder=/other/folder."
        )


def _copy(source: str, copy: str) -> None:
    os.makedirs(os.path.dirname(copy), exist_ok=True)
    partial = f"{copy}.{uuid.uuid4().hex}.partial"
    try:
        shutil.copy2(source, partial)
        os.replace(partial, copy)
    except BaseException:
        if os.path.exists(partial):
            os.remove(partial)
        raise
