"""A folder for what a switch writes (caches, copies): one for a comparison, otherwise one for the process; then it is gone."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

VARIABLE = "PERFTRAIN_SCRATCH"
"""Set by whoever starts several processes that are to share the folder, and who removes it."""


MEMORY = Path("/dev/shm")
"""A file system in memory, where there is one (Linux)."""


def scratch_folder(name: str, in_memory: bool = False) -> Path:
    """The sub-folder ``name`` of the scratch folder, made if it is missing. Several processes may ask at once.

    Args:
        in_memory: in the scratch folder's twin in memory, which is gone together with it.
    """
    root = Path(os.environ.get(VARIABLE) or _own())
    folder = (_twin(root) if in_memory else root) / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def shared_scratch() -> Iterator[str]:
    """A scratch folder for several processes: start them with :data:`VARIABLE` set to it. It is gone afterwards."""
    folder = tempfile.mkdtemp(prefix="perftrain-")
    try:
        yield folder
    finally:
        _remove(folder)


def _twin(root: Path) -> Path:
    return MEMORY / f"perftrain{str(root.absolute()).replace(os.sep, '-')}"


def _remove(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(_twin(Path(folder)), ignore_errors=True)


@cache
def _own() -> str:
    folder, owner = tempfile.mkdtemp(prefix="perftrain-"), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not in forked loader workers
            _remove(folder)

    atexit.register(remove)
    return folder
