"""A PyTorch training loop in which every speed optimization is a switch with an honest verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perftrain.facts import Diagnosis, RunRecord, StepBreakdown, Verdict

if TYPE_CHECKING:
    from perftrain import opt as opt
    from perftrain.engine.trainer import Trainer as Trainer
    from perftrain.facts import PerftrainError as PerftrainError
    from perftrain.loggers import MLflow as MLflow
    from perftrain.loggers import TensorBoard as TensorBoard
    from perftrain.measure.meter import Meter as Meter
    from perftrain.opt.seams import Workload as Workload
    from perftrain.report.live import live_view as live_view

__version__ = "0.1.0"
__all__ = ["MLflow", "Meter", "PerftrainError", "TensorBoard", "Trainer", "Workload", "live_view", "opt"]

_HOMES = {
    "Trainer": "perftrain.engine.trainer",
    "Meter": "perftrain.measure.meter",
    "Workload": "perftrain.opt.seams",
    "PerftrainError": "perftrain.facts",
    "TensorBoard": "perftrain.loggers",
    "MLflow": "perftrain.loggers",
    "live_view": "perftrain.report.live",
}


def __getattr__(name: str) -> Any:
    """Names are imported on first use: the command line answers before torch is loaded."""
    import importlib

    if name == "opt":
        return importlib.import_module("perftrain.opt")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'perftrain' has no attribute {name!r}")


def _html(record: Any) -> str:
    from perftrain.report.notebook import html_of

    return html_of(record)


for _record in (Diagnosis, RunRecord, StepBreakdown, Verdict):
    _record._repr_html_ = _html  # type: ignore[attr-defined]  # facts know nothing of drawing; notebooks look for this name
