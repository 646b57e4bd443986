"""What is to be measured, where, and the fingerprint under which results may be compared."""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate

import perftrain
from perftrain.compare.duet import BASELINE, VARIANT, Protocol
from perftrain.engine.process import environment
from perftrain.facts import PerftrainError
from perftrain.fingerprint import fingerprint
from perftrain.measure import machine
from perftrain.opt.base import Switch
from perftrain.opt.huge_pages import why_no_huge_pages, with_tunable
from perftrain.store import Store

CODE_THAT_SHAPES_SPEED = ("engine", "measure", "opt", "data")


@dataclass(frozen=True)
class Job:
    """A recipe on this machine, with the switches that are to be judged (none: only the baseline)."""

    recipe_name: str
    recipe: Mapping[str, Any]
    """``_target_`` and its arguments, plain JSON."""
    store: Store
    opts: tuple[Mapping[str, Any], ...] = ()
    """``_target_`` and fields of each switch."""
    device: str = "cpu"
    protocol: Protocol = field(default_factory=Protocol)
    base: tuple[Mapping[str, Any], ...] = ()
    """Switches that are on in both arms."""

    def with_opts(self, opts: Sequence[Mapping[str, Any]]) -> Job:
        return replace(self, opts=tuple(opts))

    def switches(self) -> list[Switch]:
        return [instantiate(o) for o in self.opts]

    def all_switches(self) -> list[Switch]:
        """Those of both arms, then those that are judged."""
        return [instantiate(o) for o in (*self.base, *self.opts)]

    def spec(self) -> dict[str, Any]:
        """What a worker must know."""
        base = [dict(o) for o in self.base]
        return {"recipe": dict(self.recipe), "arms": {BASELINE: base, VARIANT: [*base, *map(dict, self.opts)]}, "device": self.device}

    def environments(self, switches: Sequence[Switch]) -> tuple[dict[str, dict[str, str]], tuple[str, ...]]:
        """Variables for each arm's process, and notes about what was done to both."""
        extra = environment(switches)
        both: dict[str, str] = {"PYTHONHASHSEED": "0"}
        notes: tuple[str, ...] = ()
        about_malloc = {"GLIBC_TUNABLES", "LD_PRELOAD"} & extra.keys()
        if self.protocol.stabilize and self.device == "cpu" and not about_malloc and sys.platform.startswith("linux"):
            both["GLIBC_TUNABLES"] = steady_malloc(os.environ.get("GLIBC_TUNABLES", ""))
            notes = ("both arms timed with a malloc that keeps its memory, which scatters less (measure.stabilize=false: without)",)
        base = environment([instantiate(o) for o in self.base])
        return {BASELINE: {**both, **base}, VARIANT: {**both, **base, **extra}}, notes

    def workload(self) -> dict[str, Any]:
        """The part of the fingerprint that is about the program."""
        target = instantiate(self.recipe)
        return {
            "recipe": {k: v for k, v in self.recipe.items() if k != "steps"},
            "data": target.identity() if hasattr(target, "identity") else {},
            "seed": self.protocol.seed,
            "parity": {"steps": self.protocol.parity_steps, "seeds": self.protocol.parity_seeds},
        }

    def parts(self) -> dict[str, Any]:
        """Everything a result depends on; two results may be compared only if all of it is equal."""
        return {
            "workload": self.workload(),
            "device": self.device,
            "machine": machine.describe(),
            "software": machine.software(),
            "settings": machine.settings(),
            "code": code_state(self.recipe),
        }


def steady_malloc(existing: str) -> str:
    """Tunables under which malloc keeps what it has and, where the kernel allows it, asks for huge pages.

    Memory that goes back to the kernel after every step comes back with page faults, in bursts of a second: that was most of
    the scatter between steps and between rounds (benchmarks/measuring/results).
    """
    kept = ":".join(filter(None, [existing, f"glibc.malloc.mmap_threshold={1 << 32}", f"glibc.malloc.trim_threshold={1 << 32}"]))
    return kept if why_no_huge_pages() else with_tunable(kept)


def find_device(wanted: str) -> str:
    """``auto`` is CUDA where there is one.

    Raises:
        PerftrainError: a device that this machine lacks.
    """
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind = wanted.split(":")[0]
    if kind not in ("cpu", "cuda"):
        raise PerftrainError(f"device is auto, cpu or cuda; it was {wanted!r}. Try device=auto.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise PerftrainError(f"device={wanted} needs a CUDA device; torch {torch.__version__} sees none here. Try device=cpu.")
    return wanted


def code_state(recipe: Mapping[str, Any]) -> str:
    """A hash of the source of the recipe and of what trains and measures."""
    module = inspect.getmodule(_class_of(recipe))
    files = [Path(module.__file__)] if module and module.__file__ else []
    package = Path(perftrain.__file__).parent
    for room in CODE_THAT_SHAPES_SPEED:
        files += sorted((package / room).glob("*.py"))
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _class_of(recipe: Mapping[str, Any]) -> type:
    from hydra.utils import get_class

    return get_class(str(recipe["_target_"]))


def key_of(job: Job, parts: Mapping[str, Any]) -> str:
    """Under which a verdict is kept: fingerprint, switches with their settings, and how it was measured."""
    protocol = dict(vars(job.protocol))
    return fingerprint(
        {
            "parts": parts,
            "opts": [dict(o) for o in job.opts],
            "protocol": protocol,
            **({"base": [dict(o) for o in job.base]} if job.base else {}),
        }
    )[:16]
