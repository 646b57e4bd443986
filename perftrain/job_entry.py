"""The function that Hydra calls for each job of a sweep. It only coordinates: what is timed runs in processes of its own."""

from __future__ import annotations

from typing import Any


def job(cfg: Any) -> float | None:
    """One job; returns the lower end of the speedup's interval, for sweepers that optimize.

    Hydra itself prints the configuration for ``--cfg job`` and does not come here.
    """
    from perftrain import measured
    from perftrain.cli import Terminal

    return measured.sweep_job(cfg, Terminal())
