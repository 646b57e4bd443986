"""The processor cores that this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """How many: the CPU affinity decides, where the system has one."""
    return len(core_numbers())


def core_numbers() -> list[int]:
    """Which, in order."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
