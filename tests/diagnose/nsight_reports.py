"""Reports as nsys and ncu export them, made by the documented schema: SQLite tables with times in nanoseconds, CSV with a line of units."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field
from pathlib import Path

PROCESS = 7 << 24
MAIN = PROCESS + 1
TABLES = {
    "StringIds": "id INTEGER PRIMARY KEY, value TEXT NOT NULL",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, globalPid INTEGER, "
    "demangledName INTEGER, shortName INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start INTEGER, end INTEGER, deviceId INTEGER, bytes INTEGER, copyKind INTEGER, srcKind INTEGER, "
    "dstKind INTEGER",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER, end INTEGER, globalTid INTEGER, nameId INTEGER",
    "NVTX_EVENTS": "start INTEGER, end INTEGER, eventType INTEGER, text TEXT, textId INTEGER, globalTid INTEGER",
}
PUSH_POP, MARK = 59, 34


@dataclass
class Nsys:
    """Times are given in microseconds."""

    rows: dict[str, list[tuple[object, ...]]] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)

    def _add(self, table: str, *row: object) -> None:
        self.rows.setdefault(table, []).append(row)

    def _name(self, text: str) -> int:
        return self.names.setdefault(text, len(self.names) + 1)

    def kernel(
        self, start: float, end: float, name: str = "vectorized_elementwise_kernel", device: int = 0, process: int = PROCESS
    ) -> None:
        identity = self._name(name)
        self._add("CUPTI_ACTIVITY_KIND_KERNEL", int(1000 * start), int(1000 * end), device, 7, process, identity, identity)

    def upload(self, start: float, end: float, pageable: bool) -> None:
        kinds = (0, 2) if pageable else (1, 2)
        self._add("CUPTI_ACTIVITY_KIND_MEMCPY", int(1000 * start), int(1000 * end), 0, 1 << 20, 1, *kinds)

    def call(self, start: float, end: float, name: str) -> None:
        self._add("CUPTI_ACTIVITY_KIND_RUNTIME", int(1000 * start), int(1000 * end), MAIN, self._name(name))

    def range(self, start: float, end: float, text: str) -> None:
        self._add("NVTX_EVENTS", int(1000 * start), int(1000 * end), PUSH_POP, None, self._name(text), MAIN)

    def mark(self, at: float, text: str) -> None:
        self._add("NVTX_EVENTS", int(1000 * at), None, MARK, text, None, MAIN)

    def write(self, path: Path) -> Path:
        with sqlite3.connect(path) as connection:
            for table, rows in {**self.rows, "StringIds": [(i, n) for n, i in self.names.items()]}.items():
                connection.execute(f"CREATE TABLE {table} ({TABLES[table]})")
                connection.executemany(f"INSERT INTO {table} VALUES ({','.join('?' * len(rows[0]))})", rows)
        connection.close()
        return path


HEAD = ("ID", "Process ID", "Process Name", "Kernel Name", "Stream", "Device", "gpu__time_duration.sum",
        "sm__throughput.avg.pct_of_peak_sustained_elapsed", "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed")  # fmt: skip


def ncu_csv(*kernels: tuple[str, float, float, float]) -> str:
    """(name, microseconds, compute %, memory %) of each, as ``ncu --csv --page raw`` prints them."""
    lines = [HEAD, ("", "", "", "", "", "", "us", "%", "%")]
    lines += [
        (str(i), "1", "python", name, "7", "0", f"{us:,.2f}", str(sm), str(memory)) for i, (name, us, sm, memory) in enumerate(kernels)
    ]
    return "==PROF== Connected\nepoch 1\n" + "\n".join(",".join(f'"{word}"' for word in line) for line in lines) + "\n"
