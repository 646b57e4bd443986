"""Run folders on disk: atomic, versioned, safe under parallel writers, readable without torch and without pickle.

====================================  ====================================================================
``<root>/<run_id>/run.json``          ``{"schema": 1, "run": {...}}``
``<root>/<run_id>/steps.csv``         one row a step: step, samples, loss, peak_bytes, then ``<phase>_s`` ...
``<root>/verdicts/<key>.json``        ``{"schema": 1, "verdict": {...}}``
``<root>/.locks/<name>.lock``         one file a lock; ``.holder`` beside it says who has it
``<root>/.saving-*``                  being written; a reader never looks there
``<root>/.replaced-<run_id>``         the old half of a replacement; counts as the run while ``<run_id>`` is missing
====================================  ====================================================================

JSON is strict (see ``fingerprint.py``). In ``steps.csv`` they are ``nan`` and ``inf``; an empty cell means "not measured".
"""

from __future__ import annotations

import csv
import io
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from perftrain.facts import PHASES, SCHEMA, PerftrainError, RunRecord, StepRow, run_record_from
from perftrain.fingerprint import from_json, to_json

_SAVING, _REPLACED, _VERDICTS = ".saving-", ".replaced-", "verdicts"
_NO_RUNS = {_VERDICTS, "sweeps", "tune"}
"""Folders beside the runs."""
_COLUMNS = ("step", "samples", "loss", "peak_bytes")
_ABANDONED_S = 3600.0
"""A save takes seconds: a temporary folder this old belongs to a writer that died."""


def new_run_id(recipe: str, role: str, fingerprint: str) -> str:
    """A run id nobody else has, readable in a listing: ``digits-baseline-1a2b3c4d-20250131T235959-9f3e21``."""
    name = re.sub(r"[^A-Za-z0-9]+", "_", recipe).strip("_")[:80] or "script"
    return f"{name}-{role}-{fingerprint[:8]}-{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"


# --- steps.csv ---
def _steps_to_csv(rows: Sequence[StepRow]) -> str:
    seen = dict.fromkeys(phase for row in rows for phase in row.phase_s)
    phases = [p for p in PHASES if p in seen] + [p for p in seen if p not in PHASES]
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*_COLUMNS, *(f"{p}_s" for p in phases)])
    for row in rows:
        loss = None if row.loss is None else repr(float(row.loss))  # repr: the shortest text that gives the same bits back
        times = (repr(float(row.phase_s[p])) if p in row.phase_s else None for p in phases)
        writer.writerow([row.step, row.samples, loss, row.peak_bytes, *times])
    return out.getvalue()


def _steps_from_csv(text: str) -> list[StepRow]:
    reader = csv.reader(io.StringIO(text, newline=""))
    phases = [column.removesuffix("_s") for column in next(reader)[len(_COLUMNS) :]]
    rows: list[StepRow] = []
    for step, samples, loss, peak, *times in reader:
        phase_s = {p: float(t) for p, t in zip(phases, times, strict=True) if t}
        rows.append(StepRow(int(step), phase_s, int(samples), float(loss) if loss else None, int(peak) if peak else None))
    return rows


# --- files ---
def _write(file: Path, content: bytes) -> None:
    """Write and wait until it is on the disk: a rename may otherwise survive a power cut that the content does not."""
    with file.open("xb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())


def _checked(name: str, what: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+=,@-]{0,199}", name) or name == _VERDICTS:
        raise PerftrainError(
            f"A {what} names a file: up to 200 letters, digits and ._+=,@- with a letter or digit first, and not {_VERDICTS!r}. "
            f"Seen: {name!r}. Choose another."
        )
    return name


def _unwrap(content: bytes, file: Path, kind: str) -> Any:
    """What the file holds under ``kind``. Raises PerftrainError where it is broken or newer than this version reads."""
    try:
        raw = from_json(content)
        schema = int(raw["schema"])
        if schema <= SCHEMA:
            return raw[kind]
    except (ValueError, KeyError, TypeError) as error:
        raise PerftrainError(f"{file} is not a {kind} record of perftrain: {error!r}. Move it away, or delete it.") from error
    raise PerftrainError(
        f"A record is read by a perftrain that knows its schema. {file} has schema {schema}; this version reads up to {SCHEMA}. "
        "Upgrade perftrain (pip install --upgrade perftrain), or keep this version's runs elsewhere with --runs DIR."
    )


class Store:
    """The runs, verdicts and locks under one folder, which is created by the first write."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    # --- runs ---
    def save(self, record: RunRecord, rows: Sequence[StepRow]) -> Path:
        """Write a run and return its folder. Whoever looks sees the whole of it or nothing, even if this process is killed.

        A run that was saved as interrupted or failed is replaced; a complete one never is. Raises PerftrainError on that,
        on a full or read-only disk (leaving no partial file), and where a newer version's run has the same id.
        """
        _checked(record.run_id, "run id")
        run = to_json({"schema": SCHEMA, "run": record}).encode()
        steps = _steps_to_csv(rows).encode()
        with self._writing(len(run) + len(steps)):
            self.root.mkdir(parents=True, exist_ok=True)
            temporary = self.root / f"{_SAVING}{secrets.token_hex(8)}"
            try:
                temporary.mkdir()
                _write(temporary / "steps.csv", steps)
                _write(temporary / "run.json", run)
                with self._held("_save"):
                    return self._publish(temporary, record)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)

    def load(self, run: str | Path) -> RunRecord:
        """A run by its id or its folder. Raises PerftrainError if there is none, or it is broken or too new."""
        file = self._folder(run) / "run.json"
        raw = _unwrap(self._read(file), file, "run")
        try:
            return run_record_from(raw)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PerftrainError(f"{file} is not a run record of perftrain: {error!r}. Move it away, or delete it.") from error

    def load_steps(self, run: str | Path) -> list[StepRow]:
        """The rows of a run, to the last bit. Raises PerftrainError as :meth:`load` does."""
        folder = self._folder(run)
        _unwrap(self._read(folder / "run.json"), folder / "run.json", "run")  # the schema of the folder stands there
        try:
            return _steps_from_csv(self._read(folder / "steps.csv").decode())
        except PerftrainError:
            raise
        except (ValueError, StopIteration) as error:
            raise PerftrainError(f"{folder / 'steps.csv'} is broken: {error!r}. Move the run away, or delete it.") from error

    def scan(self) -> tuple[list[RunRecord], list[str]]:
        """All runs, newest first, and one line for each folder that could not be read."""
        records: list[RunRecord] = []
        warnings: list[str] = []
        names = [p.name for p in self.root.iterdir() if p.is_dir()] if self.root.is_dir() else []
        for name in sorted({n.removeprefix(_REPLACED) for n in names if n[0] != "." or n.startswith(_REPLACED)} - _NO_RUNS):
            try:
                records.append(self.load(self.root / name))
            except PerftrainError as error:
                warnings.append(str(error))
        return sorted(records, key=lambda record: (record.started, record.run_id), reverse=True), warnings

    def runs(self) -> list[RunRecord]:
        """All runs that can be read, newest first."""
        return self.scan()[0]

    def baseline(self, fingerprint: str) -> RunRecord | None:
        """The newest complete baseline of exactly this workload, machine, software and code."""
        fit = (r for r in self.runs() if (r.role, r.status, r.fingerprint) == ("baseline", "complete", fingerprint))
        return next(fit, None)

    # --- verdicts ---
    def save_verdict(self, verdict: Mapping[str, Any], key: str) -> Path:
        """Keep a verdict, replacing an older one with the same key. Raises PerftrainError as :meth:`save` does."""
        file = self.root / _VERDICTS / f"{_checked(key, 'verdict key')}.json"
        self.verdict(key)  # refuses to overwrite what a newer version wrote
        content = to_json({"schema": SCHEMA, "verdict": verdict}).encode()
        with self._writing(len(content)):
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary = file.with_name(f"{_SAVING}{secrets.token_hex(8)}")
            try:
                _write(temporary, content)
                os.replace(temporary, file)
            finally:
                temporary.unlink(missing_ok=True)
        return file

    def verdict(self, key: str) -> dict[str, Any] | None:
        """A verdict kept before, or None. Raises PerftrainError where the file is broken or too new."""
        file = self.root / _VERDICTS / f"{_checked(key, 'verdict key')}.json"
        return _unwrap(self._read(file), file, "verdict") if file.exists() else None

    # --- locks ---
    @contextmanager
    def lock(self, name: str, on_wait: Callable[[str], None] | None = None) -> Iterator[None]:
        """One process (and thread) at a time holds ``name``; the system lets go of it if the holder dies.

        Waits without end. Where it must wait, calls ``on_wait`` once with the holder in words. To record a baseline once,
        whoever else wants it: take the lock, look again with :meth:`baseline`, and record only if there is none.
        """
        with self._held(_checked(name, "lock name"), on_wait):
            yield

    @contextmanager
    def _held(self, name: str, on_wait: Callable[[str], None] | None = None) -> Iterator[None]:
        lock = FileLock(self.root / ".locks" / f"{name}.lock")
        holder = Path(lock.lock_file).with_suffix(".holder")
        with self._writing(needed_bytes=4096):  # an empty file takes a block
            holder.parent.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                if on_wait is not None:
                    on_wait(holder.read_text().strip() if holder.exists() else "another process")
                lock.acquire(poll_interval=0.05)
        try:
            with suppress(OSError):  # a courtesy to those who wait
                holder.write_text(f"process {os.getpid()} on {socket.gethostname()} since {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC\n")
            yield
        finally:
            lock.release()

    # --- inside ---
    def _folder(self, run: str | Path) -> Path:
        return run if isinstance(run, Path) else Path(run) if os.sep in run else self.root / run

    def _read(self, file: Path) -> bytes:
        """The content, wherever a replacement in progress has the folder at this moment."""
        replaced = file.parent.with_name(_REPLACED + file.parent.name) / file.name
        for place in (file, replaced, file):
            try:
                return place.read_bytes()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise PerftrainError(f"{place} cannot be read: {error.strerror}. Mend its permissions, or move it away.") from error
        raise PerftrainError(f"A record needs the file {file}, and there is none. `perftrain runs --runs {self.root}` lists the runs.")

    def _publish(self, temporary: Path, record: RunRecord) -> Path:
        """Move a finished folder to its name. The caller holds the lock that serializes this."""
        self._recover()
        target, replaced = self.root / record.run_id, self.root / f"{_REPLACED}{record.run_id}"
        if target.exists():
            if self.load(target).status == "complete":
                raise PerftrainError(f"A complete run is never overwritten, and {target} is one. Save under another run id.")
            os.rename(target, replaced)  # a full folder cannot be renamed over; until the next line it counts as the run
        os.rename(temporary, target)
        shutil.rmtree(replaced, ignore_errors=True)
        return target

    def _recover(self) -> None:
        """Finish what writers that died left behind."""
        for replaced in self.root.glob(f"{_REPLACED}*"):
            target = self.root / replaced.name.removeprefix(_REPLACED)
            if target.exists():
                shutil.rmtree(replaced, ignore_errors=True)
            else:
                os.rename(replaced, target)
        for temporary in self.root.glob(f"{_SAVING}*"):
            with suppress(OSError):
                if time.time() - temporary.stat().st_mtime > _ABANDONED_S:
                    shutil.rmtree(temporary, ignore_errors=True)

    @contextmanager
    def _writing(self, needed_bytes: int) -> Iterator[None]:
        """Turn the system's refusals into words."""
        try:
            yield
        except OSError as error:
            place = next(p for p in (self.root.absolute(), *self.root.absolute().parents) if p.exists())
            raise PerftrainError(
                f"Runs are kept in {self.root}, which must be writable. Seen: {error.strerror or error} "
                f"({needed_bytes} bytes needed, {shutil.disk_usage(place).free} bytes free). "
                "Free some space or mend its permissions, or keep runs elsewhere with --runs DIR."
            ) from error
