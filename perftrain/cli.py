"""The command line: verbs to rooms. Everything is refused here before torch is loaded where that is possible."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from perftrain.composing import check, config_dir
from perftrain.facts import PerftrainError
from perftrain.options import HELP, Line, again, as_overrides, sort_out
from perftrain.report import terminal
from perftrain.report.jsonfile import write_json
from perftrain.report.live import live_view
from perftrain.report.progress import progress

terminated: list[int] = []
"""The SIGTERM that came, if one did: it is handled like Ctrl-C, with an exit code of its own."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if any(a in ("-h", "--help", "help") for a in given):
        print(HELP, end="")
        return 0
    terminated.clear()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        return _run(sort_out(given))
    except PerftrainError as error:
        return _say_error(str(error), 2)
    except KeyboardInterrupt:
        return _say_error("stopped by SIGTERM", 143) if terminated else _say_error("stopped", 130)


def _terminate(number: int, _: Any) -> None:
    terminated.append(number)
    raise KeyboardInterrupt


def _say_error(message: str, code: int) -> int:
    sys.stdout.flush()
    print(f"perftrain: {message}", file=sys.stderr)
    return code


def _run(line: Line) -> int:
    if line.hydra_flags:
        return _hydra(line)
    if line.verb in ("diagnose", "tune") or line.program:
        return _on_a_program(line)
    if line.verb == "report":
        from perftrain.reported import report_line

        return report_line(line, Terminal())
    composed = check(line)
    for cfg in composed:
        if cfg.json and not Path(str(cfg.json)).parent.is_dir():  # now, not after minutes of measuring
            folder = Path(str(cfg.json)).parent
            raise PerftrainError(f"A JSON file needs an existing folder; {str(folder)!r} is none. Type: mkdir -p {folder}")
    if line.verb == "runs":
        return _runs(composed[0])
    if line.verb in ("doctor", "opts"):
        return _doctor(composed[0], only_opts=line.verb == "opts")
    from perftrain import measured  # loads torch

    try:
        if line.multirun:
            return measured.sweep(line, composed, Terminal(), lambda: _hydra(line))
        return measured.single(composed[0], Terminal(), again(line))
    except measured.ProgramFailed as error:
        sys.stdout.flush()
        print(error.traceback.rstrip(), file=sys.stderr)
        return _say_error(f"the program under test failed without any switch: {error}", 1)


def _hydra(line: Line) -> int:
    """Hand the line to Hydra: sweeps, and its own flags (``--cfg job``, ``--info``)."""
    import hydra

    before, sys.argv = sys.argv, ["perftrain", *line.hydra_flags, *(["-m"] if line.multirun else []), *as_overrides(line)]
    try:
        from perftrain.job_entry import job

        hydra.main(config_path=config_dir(), config_name="config", version_base="1.3")(job)()
    finally:
        sys.argv = before
    return 0


class Terminal:
    """Progress on standard error, lines on standard output."""

    def progress(self, description: str, total: float) -> AbstractContextManager[Any]:
        return progress(description, total)

    def training(self, description: str) -> AbstractContextManager[Any]:
        return live_view(description)

    def say(self, line: str) -> None:
        sys.stdout.flush()
        print(line, file=sys.stderr, flush=True)


def _on_a_program(line: Line) -> int:
    from perftrain import tuned
    from perftrain.diagnosed import ScriptFailed, diagnose_line
    from perftrain.gated import gate_line

    verbs = {"diagnose": diagnose_line, "try": tuned.try_line, "tune": tuned.tune_line, "gate": gate_line}
    try:
        return verbs[line.verb](line, Terminal())
    except ScriptFailed as error:
        sys.stdout.flush()
        if error.said:
            print(error.said.rstrip(), file=sys.stderr)
        return _say_error(str(error), 1)


# --- verbs that only look ---
def _runs(cfg: Any) -> int:
    from perftrain.report.jsonfile import run_json
    from perftrain.store import Store

    records, warnings = Store(Path(cfg.runs)).scan()
    terminal.print_runs(terminal.stdout_console(), records)
    for warning in warnings:
        print(f"perftrain: {warning}", file=sys.stderr)
    if cfg.json:
        write_json(cfg.json, {"schema": 1, "runs": [run_json(r) for r in records]})
    return 0


def _doctor(cfg: Any, only_opts: bool) -> int:
    from perftrain.measured import doctor_facts

    facts = doctor_facts(cfg, Terminal(), only_opts)
    console = terminal.stdout_console()
    if only_opts:
        terminal.print_opts(console, facts["opts"])
    else:
        terminal.print_doctor(console, facts)
    if cfg.json:
        write_json(cfg.json, {"schema": 1, "opts": facts["opts"]} if only_opts else {"schema": 1, "doctor": facts})
    return 0
