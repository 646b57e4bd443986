"""A PyTorch training loop in which every speed optimization is a switch with an honest verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perftrain import opt as opt
    from perftrain.engine.trainer import Trainer as Trainer
    from perftrain.facts import PerftrainError as PerftrainError
    from perftrain.measure.meter import Meter as Meter
    from perftrain.opt.seams import Workload as Workload

__version__ = "0.1.0"
__all__ = ["Meter", "PerftrainError", "Trainer", "Workload", "opt"]

_HOMES = {
    "Trainer": "perftrain.engine.trainer",
    "Meter": "perftrain.measure.meter",
    "Workload": "perftrain.opt.seams",
    "PerftrainError": "perftrain.facts",
}


def __getattr__(name: str) -> Any:
    """Names are imported on first use: the command line answers before torch is loaded."""
    import importlib

    if name == "opt":
        return importlib.import_module("perftrain.opt")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'perftrain' has no attribute {name!r}")
