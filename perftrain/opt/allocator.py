"""Another memory allocator, or other settings of it: CUDA's caching allocator, or malloc on a CPU."""

from __future__ import annotations

import ctypes.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from perftrain.facts import Bottleneck, Card, Gain, Numerics, PerftrainError, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import Plan

LIBRARIES = {"jemalloc": ("jemalloc",), "tcmalloc": ("tcmalloc", "tcmalloc_minimal")}
PACKAGES = {"auto": "libjemalloc2", "jemalloc": "libjemalloc2", "tcmalloc": "libtcmalloc-minimal4"}
FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")
KEEP = {
    "jemalloc": {"MALLOC_CONF": "background_thread:true,metadata_thp:auto,dirty_decay_ms:-1,muzzy_decay_ms:-1"},
    "tcmalloc": {"TCMALLOC_RELEASE_RATE": "0"},
}
"""Settings under which freed memory is kept for the next step instead of going back to the kernel."""


@dataclass(frozen=True)
class Allocator(Switch):
    """On a CPU: load jemalloc or tcmalloc before everything else (``LD_PRELOAD``) and let it keep what it has. With CUDA: settings
    of the caching allocator (``PYTORCH_ALLOC_CONF``).

    On a CPU it pays for steps that allocate and free tensors of megabytes from several threads; not for small models. The baseline
    is then the C library's malloc as it is, without the settings that steady other comparisons. With CUDA ``expandable_segments``
    is about fragmentation (shapes that change), so about what fits rather than about speed; nothing for fixed shapes. It acts on
    CUDA's allocator wherever there is CUDA. Sources: PyTorch CUDA notes, "Optimizing memory usage"; PyTorch tuning guide, CPU.
    """

    library: str = "auto"
    keep_memory: bool = True
    expandable_segments: bool = True
    garbage_collection_threshold: float | None = None
    max_split_size_mb: int | None = None

    card: ClassVar[Card] = Card(
        name="allocator",
        summary="CPU: jemalloc or tcmalloc instead of malloc; CUDA: settings of the caching allocator",
        place=Place.PROCESS,
        numerics=Numerics.EXACT,
        relieves=(Bottleneck.COMPUTE_MEMORY_BOUND, Bottleneck.MEMORY_CAPACITY),
        requires=("CPU: Linux with libjemalloc or libtcmalloc installed",),
        conflicts=("huge_pages",),
        cost="freed memory is kept rather than returned",
    )

    def __post_init__(self) -> None:
        if self.library not in PACKAGES:
            raise PerftrainError(
                f"allocator.library is one of {', '.join(PACKAGES)}; it was {self.library!r}. Try opt.allocator.library=jemalloc."
            )
        threshold, split = self.garbage_collection_threshold, self.max_split_size_mb
        if threshold is not None and not 0 < threshold < 1:
            raise PerftrainError(
                f"allocator.garbage_collection_threshold lies between 0 and 1; it was {threshold}. "
                "Try opt.allocator.garbage_collection_threshold=0.8."
            )
        if split is not None and split <= 20:
            raise PerftrainError(f"allocator.max_split_size_mb is more than 20; it was {split}. Try opt.allocator.max_split_size_mb=128.")

    def unavailable(self, plan: Plan) -> str:
        if plan.device.type == "cuda":
            settings = (self.garbage_collection_threshold, self.max_split_size_mb)
            return "" if self.expandable_segments or any(settings) else "every setting is CUDA's own default; set one, or leave it out."
        if torch.cuda.is_available():
            return "where there is CUDA it sets CUDA's allocator, and the device is the CPU; hide CUDA: CUDA_VISIBLE_DEVICES= perftrain ..."
        if not sys.platform.startswith("linux"):
            return f"it loads a library through Linux's LD_PRELOAD; this is {sys.platform}."
        if find_library(self.library):
            return ""
        wanted = "jemalloc or tcmalloc" if self.library == "auto" else self.library
        return f"no library {wanted} is installed; try: apt-get install {PACKAGES[self.library]}"

    def describe(self, plan: Plan) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.environment().items())

    def predict(self, now: StepBreakdown) -> Gain:
        share = now.share("forward", "backward", "optimizer")
        return Gain.from_share(share, 1.0, 1.15, f"computing is {share:.0%} of the step; allocating is a part of that")

    def environment(self) -> Mapping[str, str]:
        if torch.cuda.is_available():
            return self._cuda()
        found = find_library(self.library)
        if found is None:
            return {}
        name, path = found
        others = [part for part in os.environ.get("LD_PRELOAD", "").split(":") if part and part != path]
        return {"LD_PRELOAD": ":".join([path, *others]), **(KEEP[name] if self.keep_memory else {})}

    def _cuda(self) -> Mapping[str, str]:
        """The variable that is set already wins over the newer name, so its own options are kept and ours added there."""
        wanted = {"expandable_segments": str(self.expandable_segments)}
        if self.garbage_collection_threshold is not None:
            wanted["garbage_collection_threshold"] = str(self.garbage_collection_threshold)
        if self.max_split_size_mb is not None:
            wanted["max_split_size_mb"] = str(self.max_split_size_mb)
        name = "PYTORCH_CUDA_ALLOC_CONF" if "PYTORCH_CUDA_ALLOC_CONF" in os.environ else "PYTORCH_ALLOC_CONF"
        return {name: with_options(os.environ.get(name, ""), wanted)}


def with_options(existing: str, wanted: Mapping[str, str]) -> str:
    """``existing`` (``name:value`` with commas between) with the ``wanted`` options instead of its own of the same name."""
    others = [part.strip() for part in existing.split(",") if part.strip() and part.split(":")[0].strip() not in wanted]
    return ",".join([*others, *(f"{name}:{value}" for name, value in wanted.items())])


def find_library(wanted: str) -> tuple[str, str] | None:
    """(``jemalloc`` or ``tcmalloc``, full path) of the first that is installed."""
    for name in LIBRARIES if wanted == "auto" else (wanted,):
        for stem in LIBRARIES[name]:
            soname = ctypes.util.find_library(stem)
            places = [Path(folder) / soname for folder in FOLDERS] if soname else []
            places += [path for folder in FOLDERS for path in sorted(Path(folder).glob(f"lib{stem}.so*"))]
            for path in places:
                if path.is_file():
                    return name, str(path)
    return None
