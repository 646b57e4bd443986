"""What a watched program is asked to do, as a file that all its processes read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Orders:
    folder: str = ""
    """Where each process leaves what it saw; :func:`perftrain.attach.launch.watch` makes it."""
    observe_s: float = 10.0
    """Watch at least so long after the first steps..."""
    least_steps: int = 30
    """...and so many steps, ..."""
    most_s: float = 25.0
    """...but no longer than this."""
    to_the_end: bool = False
    """Let the program finish by itself."""
    trace: bool = True
    profiled_steps: int = 0
    """Steps that a profiler of NVIDIA, under which the program runs, is told to record instead of torch's; 0: there is none."""
    probes: tuple[str, ...] = ()
    """Counterfactuals to take turns with the program as it is; empty: only watch."""
    probe_s: float = 20.0
    """Seconds for all turns together."""
    block_steps: int = 4
    loader: Mapping[str, Any] = field(default_factory=dict)
    """Arguments forced on every DataLoader that trains, for the whole run."""
    always: tuple[str, ...] = ()
    """Arms that are on from the second step to the end."""
    stop_after_steps: int = 0
    """End the program after so many steps; 0: by the rules above."""
    seed_offset: int = 0
    """Added to every seed that the program gives to torch."""
    threads: int = 0
    """Threads that torch computes with, whatever the program asks for; 0: as it asks."""
    losses: int = 0
    """How many of the first losses that are backpropagated are kept."""
    saving: bool = True
    """Whether torch.save writes; a run that repeats the program only to measure must not overwrite what it saved."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(path: str) -> Orders:
        raw = json.loads(Path(path).read_text())
        return Orders(**{**raw, "probes": tuple(raw["probes"]), "always": tuple(raw["always"])})
