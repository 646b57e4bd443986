"""Nsight Systems and Nsight Compute around a program: what is typed, what they leave behind, and what to say where they are missing.

The command lines follow NVIDIA's documentation; they have never been run on a machine with CUDA. Reading exported reports is tested.
``ncu`` runs each kernel several times, so it is for programs of one process: a collective that is run again waits for the other ranks.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from perftrain.attach.launch import Watched, watch
from perftrain.attach.orders import Orders
from perftrain.diagnose.ncu_file import METRICS, read_ncu
from perftrain.diagnose.nsys_file import read_nsys
from perftrain.diagnose.seen import Seen
from perftrain.facts import PerftrainError

START_LIMIT_S, GRACE_S = 900.0, 300.0
"""How long a program may take to get to its steps and through them, and the profiler to write its report."""


@dataclass(frozen=True)
class Tool:
    command: str
    name: str
    profile: tuple[str, ...]
    """What comes before the program; the report's path is put in for ``{report}``."""
    written: str
    """Suffix of the report it writes, ..."""
    export: tuple[str, ...]
    """...how to export it, ..."""
    exported: str
    """...and the suffix of what can be read."""
    steps: int
    home: str
    read: Callable[[Path], Seen]

    @property
    def by_hand(self) -> str:
        """How to export a report, to be typed."""
        words = [w.format(report="report") for w in self.export]
        return " ".join([self.command, *words, *(("> report.csv",) if self.exported == ".csv" else ())])


TOOLS = {
    "--nsys": Tool(
        "nsys", "Nsight Systems",
        ("profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", "--capture-range=cudaProfilerApi", "--capture-range-end=stop",
         "--force-overwrite=true", "--output={report}"),
        ".nsys-rep", ("export", "--type=sqlite", "--force-overwrite=true", "--output={report}.sqlite", "{report}.nsys-rep"), ".sqlite",
        20, "https://developer.nvidia.com/nsight-systems", read_nsys,
    ),
    "--ncu": Tool(
        "ncu", "Nsight Compute",
        ("--profile-from-start=off", "--target-processes=all", "--launch-count=2000", f"--metrics={','.join(METRICS)}", "--force-overwrite",
         "--export={report}"),
        ".ncu-rep", ("--import={report}.ncu-rep", "--csv", "--page=raw"), ".csv",
        2, "https://developer.nvidia.com/nsight-compute", read_ncu,
    ),
}  # fmt: skip


def read_report(flag: str, path: Path) -> Seen:
    """An exported report.

    Raises:
        PerftrainError: it is not exported yet (with what to type), or cannot be read.
    """
    tool = TOOLS[flag]
    if path.suffix != tool.exported:
        raise PerftrainError(f"{flag} reads what {tool.command} exported, a {tool.exported} file; {path} is none. Type: {tool.by_hand}")
    return tool.read(path)


def find(flag: str) -> Tool:
    """The tool, if it is installed here."""
    tool = TOOLS[flag]
    if shutil.which(tool.command) is None:
        raise PerftrainError(
            f"{flag} runs the program under {tool.name}; there is no {tool.command!r} on the PATH here. It comes with the CUDA toolkit, or "
            f"from {tool.home}. Recorded elsewhere: perftrain diagnose {flag} report{tool.exported} (from: {tool.by_hand})"
        )
    return tool


def profiled(flag: str, program: Sequence[str], say: Callable[[int, float], None], to_the_end: bool) -> tuple[Watched, Seen]:
    """Run the program under the tool until some steps are recorded (or ``to_the_end``): what was watched, and what the report says.

    Raises:
        PerftrainError: the tool is missing, wrote nothing, or saw no kernel.
    """
    tool = find(flag)
    with tempfile.TemporaryDirectory(prefix="perftrain-") as folder:
        report = str(Path(folder) / "report")
        under = [tool.command, *(w.format(report=report) for w in tool.profile)]
        orders = Orders(observe_s=5.0, most_s=START_LIMIT_S, to_the_end=to_the_end, profiled_steps=tool.steps)
        watched = watch(program, orders, say, START_LIMIT_S, under=under, grace_s=GRACE_S)
        if not Path(report + tool.written).is_file():
            seen = (watched.processes[0].get("trace") or {}).get("failed", "") if watched.processes else ""
            raise PerftrainError(
                f"{flag} needs a report of {tool.name}; {tool.command} wrote none{f' ({seen})' if seen else ''}. "
                f"See what it says by itself: {tool.command} {' '.join(tool.profile).format(report='report')} python {' '.join(program)}"
            )
        return watched, tool.read(_export(tool, report))


def _export(tool: Tool, report: str) -> Path:
    exported = Path(report + tool.exported)
    done = subprocess.run([tool.command, *(w.format(report=report) for w in tool.export)], capture_output=True, text=True)
    if tool.exported == ".csv":
        exported.write_text(done.stdout)
    if done.returncode or not exported.is_file():
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["nothing"]
        raise PerftrainError(f"{tool.name} could not export its report; it said: {last[0]}. Type: {tool.by_hand}")
    return exported
