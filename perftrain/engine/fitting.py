"""Does a training step of so many samples fit the device's memory? Found by trying, on a copy of the program."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import replace

import torch

from perftrain.engine.loop import Run, train
from perftrain.engine.process import RandomState
from perftrain.measure.meter import Meter
from perftrain.opt.seams import LoaderOptions, Workload

STEPS = 2
"""The optimizer makes its state in the first step; the second holds it together with everything else."""


def step_fits(workload: Workload, build: Callable[[Workload], Run], batch_size: int, device: torch.device) -> bool:
    """Whether full training steps with ``batch_size`` samples fit. The workload and the random generators stay untouched.

    Args:
        build: makes a run of a workload, with every other switch.
    """
    options = replace(LoaderOptions.of(workload.loader), batch_size=batch_size)  # type: ignore[arg-type]
    random = RandomState()
    trial = replace(copy.deepcopy(replace(workload, loader=())), loader=options.build())
    run: Run | None = None
    try:
        run = build(trial)
        train(run, STEPS, Meter(device))
    except torch.OutOfMemoryError:
        return False
    finally:
        if run is not None:
            run.batches.close()  # type: ignore[attr-defined]
        del run, trial
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        random.put()
    return True
