"""What happens inside a watched program: nothing until torch is imported, then the seams are laid open."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


def wait_for_torch() -> None:
    """Lay the seams open as soon as ``import torch`` is through."""
    if "torch" in sys.modules:
        _torch_is_here()
    else:
        sys.meta_path.insert(0, _Watch())


def _torch_is_here() -> None:
    from perftrain.attach.orders import Orders
    from perftrain.attach.session import Session

    Session(Orders.read(os.environ["PERFTRAIN_ATTACH"])).open()


class _Watch(importlib.abc.MetaPathFinder):
    """Finds torch as everybody does, and says when it has been imported."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        assert module.__spec__ is not None
        module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        _torch_is_here()
