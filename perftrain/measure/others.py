"""How much of this machine everything else uses, so that turns which other programs disturbed can be told apart."""

from __future__ import annotations

import time

import psutil

from perftrain.cores import core_numbers


def others_s() -> float:
    """Core-seconds so far on the cores usable here by everything but this process and its descendants; only differences mean something.

    The kernel counts idle time in ticks (10 ms for each core), so a difference is right to about that. Time that a hypervisor
    took away counts as others'. In a container whose kernel shows the host's idle time it is the host's load.
    """
    cores, every = core_numbers(), psutil.cpu_times(percpu=True)
    idle_s = sum(every[c].idle + getattr(every[c], "iowait", 0.0) for c in cores if c < len(every))
    here = psutil.Process()
    own_s = sum(_used_s(process) for process in (here, *here.children(recursive=True)))
    return len(cores) * time.monotonic() - idle_s - own_s


def _used_s(process: psutil.Process) -> float:
    """Of a process, and of its children that have ended."""
    try:
        times = process.cpu_times()
        ended_s = times.children_user + times.children_system
        try:
            return time.clock_gettime((~process.pid << 3) | 2) + ended_s  # Linux: the clock of another process, to the nanosecond
        except OSError:
            return times.user + times.system + ended_s
    except psutil.Error:  # it has just ended
        return 0.0
