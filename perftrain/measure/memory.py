"""Peaks of memory, since the last reset; and what is free.

On a CUDA device the peak is what PyTorch's allocator handed out: the tensors, without the allocator's own reserve and without the
CUDA context. On the CPU it is the most that this process had *resident* at once: tensors, but also the interpreter, PyTorch's own
code, and whatever the C allocator keeps of what was freed. Differences between two runs of one program say more than
the value itself. Memory of other processes is in neither: loader workers and other ranks are not included.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from perftrain.facts import PerftrainError

if TYPE_CHECKING:
    import torch

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_MEMORY = Path("/proc/meminfo")
_RESET_RESIDENT_PEAK = "5"  # proc_pid_clear_refs(5), since Linux 4.0


def peak_bytes(device: torch.device | str) -> int:
    """The most memory in use at once since :func:`reset_peak` (or since the start), in bytes.

    Raises PerftrainError on devices other than ``cpu`` and ``cuda``.
    """
    if _kind(device) == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    try:
        match = re.search(r"^VmHWM:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    except OSError:
        match = None
    return int(match[1]) * 1024 if match else _peak_since_start_bytes()


def reset_peak(device: torch.device | str) -> None:
    """Let the peak start again from what is in use now. Does nothing where :func:`can_reset` is false.

    Raises PerftrainError on devices other than ``cpu`` and ``cuda``.
    """
    if _kind(device) == "cuda":
        import torch

        if torch.cuda.is_initialized():  # before that nothing is allocated, and the call would fail
            torch.cuda.reset_peak_memory_stats(device)
    elif can_reset(device):
        _CLEAR_REFS.write_text(_RESET_RESIDENT_PEAK)


def can_reset(device: torch.device | str) -> bool:
    """False where the peak can only be had since the start of the process: a CPU outside Linux, or a locked-down /proc."""
    return _kind(device) == "cuda" or os.access(_CLEAR_REFS, os.W_OK)


def free_bytes(device: torch.device | str) -> int:
    """What could still be allocated on the device; on a CPU what the system calls available."""
    if _kind(device) == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB$", _MEMORY.read_text(), re.MULTILINE)
    except OSError:
        match = None
    if match:
        return int(match[1]) * 1024
    import psutil

    return psutil.virtual_memory().available


def _kind(device: torch.device | str) -> str:
    kind = str(device).partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise PerftrainError(f"Peak memory is measured on cpu and cuda. Seen: {kind}. Choose one of these, or leave memory out.")
    return kind


def _peak_since_start_bytes() -> int:
    """Where there is no /proc: the same peak from the system's accounting, which cannot be reset."""
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes everywhere but on macOS
