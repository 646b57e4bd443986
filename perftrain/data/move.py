"""Copy a batch of any structure to a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor


def mapped(value: Any, each: Callable[[Any], Any]) -> Any:
    """``value`` (tuples, lists, dicts, dataclasses, nested) with each tensor, and each other thing that has ``.to``, replaced."""
    if isinstance(value, Tensor):
        return each(value)
    if isinstance(value, Mapping):
        return type(value)({k: mapped(v, each) for k, v in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(v, each) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(v, each) for v in value)
    if hasattr(value, "__dataclass_fields__"):
        return replace(value, **{name: mapped(getattr(value, name), each) for name in value.__dataclass_fields__})
    return each(value) if hasattr(value, "to") else value


def mover(device: torch.device) -> Callable[[Any], Any] | None:
    """A function that copies a batch to ``device``; None on the CPU, where there is nothing to do."""
    if device.type == "cpu":
        return None

    def to_device(value: Any) -> Any:
        return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value.to(device)

    return lambda batch: mapped(batch, to_device)
