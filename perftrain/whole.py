"""Files that one process leaves for another: a reader sees the old one or the new one, never a half."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replace ``path`` in one go."""
    draft = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
