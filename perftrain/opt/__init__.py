"""The switches. Each is one file here; nothing lists them but the folder itself.

>>> from perftrain import opt
>>> opt.AMP(dtype="bfloat16")
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import Any

from perftrain.opt.base import Switch


@cache
def all_switches() -> dict[str, type[Switch]]:
    """Every switch by the name on its card, found by listing this folder."""
    found: dict[str, type[Switch]] = {}
    for module_info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Switch) and value.__module__ == module.__name__ and hasattr(value, "card"):
                found[value.card.name] = value
    return dict(sorted(found.items()))


def __getattr__(name: str) -> Any:
    """``opt.AMP``: classes are looked up on first use, so that adding a file is all it takes."""
    if not name.startswith("_"):
        for switch in all_switches().values():
            if switch.__name__ == name:
                return switch
    raise AttributeError(f"perftrain.opt has no switch class {name!r}; it has {', '.join(s.__name__ for s in all_switches().values())}")
