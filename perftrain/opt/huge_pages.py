"""Transparent huge pages for malloc: fewer page faults and TLB misses in the CPU's big tensors."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from perftrain.facts import Bottleneck, Card, Gain, Numerics, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import Plan

TUNABLE = "glibc.malloc.hugetlb=1"
MODE_FILE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(frozen=True)
class HugePages(Switch):
    """Let glibc's malloc ask for transparent huge pages (``GLIBC_TUNABLES=glibc.malloc.hugetlb=1``).

    Pays on CPUs, for tensors of megabytes that are allocated and freed in every step. Nothing for what lives on a GPU.
    Source: glibc manual, "Memory Allocation Tunables". Needs glibc 2.35 and a kernel whose mode is ``madvise``.
    """

    card: ClassVar[Card] = Card(
        name="huge_pages",
        summary="malloc on transparent huge pages (glibc.malloc.hugetlb=1)",
        place=Place.PROCESS,
        numerics=Numerics.EXACT,
        relieves=(Bottleneck.COMPUTE_MEMORY_BOUND,),
        requires=("Linux with glibc 2.35 or later", "transparent huge pages in mode madvise"),
        cost="some memory: pages are 2 MiB",
    )

    def unavailable(self, plan: Plan) -> str:
        return why_no_huge_pages()

    def predict(self, now: StepBreakdown) -> Gain:
        share = now.share("forward", "backward")
        return Gain.from_share(share, 1.0, 1.15, f"forward and backward are {share:.0%} of the step; page faults are a part of that")

    def environment(self) -> Mapping[str, str]:
        return {"GLIBC_TUNABLES": with_tunable(os.environ.get("GLIBC_TUNABLES", ""))}


def with_tunable(existing: str) -> str:
    """``existing`` (colon-separated tunables) with malloc's huge pages switched on."""
    others = [part for part in existing.split(":") if part and not part.startswith("glibc.malloc.hugetlb=")]
    return ":".join([*others, TUNABLE])


def why_no_huge_pages() -> str:
    """Why malloc cannot use huge pages here, or an empty string."""
    if not sys.platform.startswith("linux"):
        return f"it is a tunable of Linux's glibc; this is {sys.platform}."
    name, version = platform.libc_ver()
    if name != "glibc" or tuple(int(x) for x in version.split(".")[:2]) < (2, 35):
        return f"it needs glibc 2.35 or later; this process uses {name or 'another C library'} {version}."
    mode = MODE_FILE.read_text() if MODE_FILE.exists() else "[never]"
    if "[madvise]" not in mode:
        state = "gives them to everybody already" if "[always]" in mode else "has switched them off"
        return f"the kernel {state} ({MODE_FILE}: {mode.strip()})."
    return ""
