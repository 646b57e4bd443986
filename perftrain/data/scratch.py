"""A folder for what a switch writes (caches, copies): one for a comparison, otherwise one for the process; then it is gone."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

VARIABLE = "PERFTRAIN_SCRATCH"
"""Set by whoever starts several processes that are to share the folder, and who removes it."""


def scratch_folder(name: str) -> Path:
    """The sub-folder ``name`` of the scratch folder, made if it is missing. Several processes may ask at once."""
    folder = Path(os.environ.get(VARIABLE) or _own()) / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@cache
def _own() -> str:
    folder, owner = tempfile.mkdtemp(prefix="perftrain-"), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not in forked loader workers
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder
