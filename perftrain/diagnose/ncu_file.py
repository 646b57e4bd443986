"""Kernels measured by Nsight Compute, exported as CSV: how much of the device's peaks each of them reached; no torch and no ncu needed.

``--page raw`` (a column for each metric, units in the second line) and the default page (a line for each metric) are both read.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from perftrain.diagnose.device import (
    MOST_KERNELS,
    TINY_KERNEL_S,
    Work,
    by_kernel,
    chains_s,
    class_of,
    class_seconds,
    in_float32,
    process_of,
)
from perftrain.diagnose.seen import Seen
from perftrain.facts import PerftrainError

COMPUTE = ("sm__throughput.avg.pct_of_peak_sustained_elapsed", "Compute (SM) Throughput", "Compute (SM) [%]")
MEMORY = ("gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed", "Memory Throughput", "Memory [%]",
          "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", "dram__throughput.avg.pct_of_peak_sustained_elapsed")  # fmt: skip
DURATION = ("gpu__time_duration.sum", "Duration")
METRICS = (COMPUTE[0], MEMORY[0], DURATION[0])
"""What a kernel must have been measured for."""
UNITS = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "s": 1.0}
"""By the first letter: ns and nsecond, us and usecond..."""
BOUND_FROM = 0.6
"""A kernel is bound by what it reached this part of the peak of; below it in both, by neither (NVIDIA's own guidance in ncu)."""
Row = Mapping[str, str]


@dataclass(frozen=True)
class Measured:
    name: str
    seconds: float
    compute: float
    """Part (0..1) of the peak throughput of the multiprocessors, ..."""
    memory: float
    """...and of the memory: what the caches and DRAM were used for, whichever was nearest its peak."""

    @property
    def bound_by(self) -> str:
        if max(self.compute, self.memory) < BOUND_FROM:
            return "neither"
        return "compute" if self.compute >= self.memory else "memory"


def read_ncu(path: Path) -> Seen:
    """The report as if the program had been watched; its one step is all kernels that were measured.

    Raises:
        PerftrainError: no such file, no CSV of ncu, or one without the three metrics.
    """
    try:
        kernels = list(_kernels(path.read_text(errors="replace").splitlines()))
    except FileNotFoundError:
        raise PerftrainError(
            f"There is no report {str(path)!r}. Type the file that ncu --import report.ncu-rep --csv --page raw printed."
        ) from None
    except (ValueError, KeyError, csv.Error) as error:
        raise PerftrainError(f"{path} is no CSV of Nsight Compute ({type(error).__name__}: {error}). Use ncu --csv --page raw.") from None
    if not kernels:
        raise PerftrainError(f"{path} holds no kernel with {', '.join(METRICS)}. Record with ncu --metrics {','.join(METRICS)}.")
    return Seen(_process(kernels))


def _kernels(lines: Sequence[str]) -> Iterator[Measured]:
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)  # ==PROF== lines and the program's own come before
    if begin is None:
        return
    rows = csv.DictReader(line for line in lines[begin:] if line.startswith('"'))
    if rows.fieldnames and "Metric Name" in rows.fieldnames:
        found, units = _pivoted(rows)
    else:
        units, found = next(rows, {}), rows
    for row in found:
        compute, memory, duration = (next((n for n in names if row.get(n)), "") for names in (COMPUTE, MEMORY, DURATION))
        if compute and memory and duration:
            scale = UNITS[units.get(duration, "n")[:1] or "n"]
            values = _number(row[duration]) * scale, _number(row[compute]) / 100, _number(row[memory]) / 100
            yield Measured(row.get("Kernel Name") or "kernel", *values)


def _pivoted(rows: csv.DictReader[str]) -> tuple[list[Row], Row]:
    """A row for each kernel out of a line for each metric; of two metrics of one name, the one in percent."""
    found: dict[str, dict[str, str]] = {}
    units: dict[str, str] = {}
    for line in rows:
        row = found.setdefault(line["ID"], {"Kernel Name": line["Kernel Name"]})
        name, unit = line["Metric Name"], line["Metric Unit"]
        if name not in row or unit == "%":
            row[name], units[name] = line["Metric Value"], unit
    return list(found.values()), units


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _process(kernels: Sequence[Measured]) -> dict[str, object]:
    seconds = sum(k.seconds for k in kernels)
    classes = class_seconds((k.name, k.seconds) for k in kernels)
    ends = [0.0, *classes.values()]
    phases = {label: [(sum(ends[:i]), sum(ends[: i + 1]))] for i, label in enumerate(classes, 1)}
    calls = [Work(0.0, k.seconds, k.name) for k in kernels]
    low = [k for k in kernels if k.bound_by == "neither"]
    trace = {
        "wall_s": seconds, "device_busy_s": seconds, "device_calls": len(kernels), "class_s": classes, "reached": _reached(kernels),
        "kernels": by_kernel(calls), "float32_s": sum(k.seconds for k in kernels if in_float32(k.name)),
        "bound_s": {kind: sum(k.seconds for k in kernels if k.bound_by == kind) for kind in ("compute", "memory", "neither")},
        "fusible_s": chains_s((class_of(k.name) if k.bound_by == "memory" else "", k.seconds) for k in kernels),
        "tiny_s": sum(k.seconds for k in low if k.seconds < TINY_KERNEL_S),
        "unfilled_s": sum(k.seconds * (1 - max(k.compute, k.memory) / BOUND_FROM) for k in low if k.seconds < TINY_KERNEL_S),
    }  # fmt: skip
    return process_of("cuda", [(0.0, seconds)], phases, trace)


def _reached(kernels: Sequence[Measured]) -> list[list[object]]:
    """[name, seconds, compute, memory] of each kernel, calls together, the longest first."""
    sums: dict[str, list[float]] = {}
    for k in kernels:
        row = sums.setdefault(k.name, [0.0, 0.0, 0.0])
        sums[k.name] = [row[0] + k.seconds, row[1] + k.compute * k.seconds, row[2] + k.memory * k.seconds]
    found = [[name, s, compute / max(1e-12, s), memory / max(1e-12, s)] for name, (s, compute, memory) in sums.items()]
    return sorted(found, key=lambda row: -float(row[1]))[:MOST_KERNELS]
