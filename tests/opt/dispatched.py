"""What torch's dispatcher really does under a ``with``: operators called, and bytes of the tensors they make."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Dispatched(TorchDispatchMode):
    """Counts the operators, and the bytes of their results that are alive (``now``) and ever were at once (``peak``)."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators[func.overloadpacket.__name__] += 1
        made = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage(), given)
        return made

    def _note(self, storage: Any, given: set[int]) -> None:
        key = storage._cdata
        if key in self.sizes or key in given:  # a view, or written in place
            return
        self.sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self.now -= self.sizes.pop(key)
