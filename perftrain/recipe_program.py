"""A recipe as a program of its own, which trains until it is stopped: ``python -m perftrain.recipe_program [overrides]``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from perftrain.attach.clock import REST
from perftrain.attach.session import watching
from perftrain.composing import check
from perftrain.engine.assemble import assemble
from perftrain.engine.loop import train
from perftrain.engine.process import process_settings, seed_everything
from perftrain.facts import PHASES
from perftrain.measure.meter import Meter
from perftrain.measured import build, job_of
from perftrain.options import sort_out


def main(arguments: Sequence[str]) -> None:
    cfg = check(sort_out(arguments))[0]
    job = job_of(cfg)
    device = torch.device(job.device)
    switches = job.switches()
    with process_settings(switches):
        seed_everything(0)
        run = assemble(build(job.recipe, "recipe").build(0), switches, device)
        train(run, 10**9, told(Meter(device)))


def told(meter: Meter) -> Meter:
    """A meter whose laps the clock of a watched process hears too: the loop knows better than torch's seams where a phase ends."""
    lap = meter.lap

    def lap_both(phase: str) -> None:
        lap(phase)
        watching[0].clock.lap(phase if phase in PHASES else REST)

    if watching:
        meter.lap = lap_both
    return meter


if __name__ == "__main__":
    main(sys.argv[1:])
