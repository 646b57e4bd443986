"""Records as strict JSON, a digest of what a measurement depends on, and where two of them differ.

NaN and infinities have no place in strict JSON: they are written ``{"$float": "nan"}`` (``"inf"``, ``"-inf"``) and come
back as floats.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import zip_longest
from pathlib import PurePath
from typing import Any


def to_json(value: Any) -> str:
    """Strict JSON of records, mappings, sequences, enums, paths and numpy scalars. Raises TypeError on anything else."""
    return json.dumps(_plain(value), allow_nan=False, ensure_ascii=False, indent=1)


def from_json(text: str | bytes) -> Any:
    """The inverse of :func:`to_json` (tuples come back as lists). Raises ValueError where ``text`` is not JSON."""
    return json.loads(text, object_hook=lambda raw: float(raw["$float"]) if raw.keys() == {"$float"} else raw)


def fingerprint(parts: Mapping[str, Any]) -> str:
    """SHA-256 (64 hex digits) of what a measurement depends on: the same in every process and after a trip through JSON."""
    return hashlib.sha256(_canonical(parts).encode()).hexdigest()


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Where ``a`` and ``b`` differ, one line each: ``software.torch: 2.14.1 → 2.13.0``. Empty if their fingerprints agree."""
    return list(_differences("", from_json(to_json(a)), from_json(to_json(b))))


def _canonical(value: Any) -> str:
    return json.dumps(_plain(value), allow_nan=False, sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if getattr(value, "ndim", None) == 0:  # a scalar of numpy, or of what behaves like one
        return _plain(value.item())  # pyright: ignore[reportAttributeAccessIssue]
    return str(value) if isinstance(value, PurePath) else value


_ABSENT = object()


def _differences(path: str, a: Any, b: Any) -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            yield from _differences(f"{path}.{key}" if path else key, a.get(key, _ABSENT), b.get(key, _ABSENT))
    elif isinstance(a, list) and isinstance(b, list):
        for index, (x, y) in enumerate(zip_longest(a, b, fillvalue=_ABSENT)):
            yield from _differences(f"{path}[{index}]", x, y)
    elif _readable(a, quoted=True) != _readable(b, quoted=True):  # as text, where NaN equals NaN and 1 is not True
        quoted = _readable(a) == _readable(b)
        yield f"{path}: {_readable(a, quoted)} → {_readable(b, quoted)}"


def _readable(value: Any, quoted: bool = False) -> str:
    if value is _ABSENT:
        return "absent"
    if isinstance(value, float) or (isinstance(value, str) and not quoted):
        return str(value)
    return _canonical(value)
