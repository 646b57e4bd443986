"""What recipes make once and keep: folders in the user's cache, whole or not there at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_dir

from perftrain.facts import PerftrainError


def cache_folder() -> Path:
    """Where made data is kept: ``$PERFTRAIN_CACHE``, or else this user's cache folder."""
    return Path(os.environ.get("PERFTRAIN_CACHE") or user_cache_dir("perftrain")).expanduser().absolute()


def made_once(folder: Path, make: Callable[[Path], None], what: str) -> Path:
    """``folder``, filled by ``make(partial_folder)`` unless it is there already.

    Safe under several processes at once, and a run that was killed leaves nothing that is taken for finished.

    Args:
        what: needs the room, for the message: "The photographs need about 120 MB".

    Raises:
        PerftrainError: the cache folder cannot be written.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():
                partial = folder.with_name(f"{folder.name}.partial")
                shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed: the lock is ours
                partial.mkdir()
                make(partial)
                os.rename(partial, folder)
    except OSError as error:
        raise PerftrainError(
            f"{what} in a folder that can be written: {folder.parent} gave {error}. "
            "Type PERFTRAIN_CACHE=/another/folder in front of the command."
        ) from error
    return folder
