"""The coordinator's end of a worker process: start, command, wait, end. No worker outlives its coordinator."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

END_S = 5.0


class WorkerFailed(RuntimeError):
    """What a worker was told to do failed there.

    Attributes:
        kind: ``exception``, ``killed``, ``timeout`` or ``interrupted``.
        facts: type, message and traceback of an exception.
    """

    def __init__(self, kind: str, message: str, facts: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.facts = dict(facts or {})

    @property
    def traceback(self) -> str:
        return str(self.facts.get("traceback", self))


LOOK_S = 1.0
"""Seconds between two looks at whether a silent process still lives."""


class Worker:
    """A fresh Python process that hosts arms. Use it as a context manager.

    Args:
        spec: ``{"recipe": ..., "arms": {name: [switch, ...]}, "device": "cpu"}``, all plain JSON.
        environment: variables on top of this process's own.
    """

    def __init__(self, spec: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        read_end, write_end = os.pipe()
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115, closed in end()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "perftrain.compare.worker", str(write_end), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(write_end,),
                env={**os.environ, **environment},
                start_new_session=True,
                text=True,
            )
        finally:
            os.close(write_end)
        self._answers = read_end
        self._buffer = b""
        self._send({"do": "host", **spec})
        self._hosting = False

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()

    # --- commands ---
    def call(
        self, do: str, *, timeout_s: float = 900.0, on_progress: Callable[[dict[str, Any]], None] | None = None, **arguments: Any
    ) -> dict[str, Any]:
        """Run one command there and return its answer.

        Raises:
            WorkerFailed: an exception there, the process died, or no sign of life within ``timeout_s``.
        """
        self.ready(timeout_s)
        self.begin(do, **arguments)
        return self.answer(timeout_s, on_progress)

    def ready(self, timeout_s: float) -> None:
        """Wait until the process stands."""
        if not self._hosting:
            self.answer(timeout_s)
            self._hosting = True

    def begin(self, do: str, **arguments: Any) -> None:
        """Send a command to a process that is ready; :meth:`answer` waits for what it answers."""
        self._send({"do": do, **arguments})

    def interrupt(self) -> None:
        """Ask it to stop what it is doing; a training run then answers with what it has."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)

    def log(self) -> str:
        """What the program under test printed so far."""
        self._log.seek(0)
        return self._log.read()

    def kill(self) -> None:
        """Kill it where it stands, with all that it started; :meth:`end` is still to be called."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its session: loader workers too, stopped or not

    def end(self) -> None:
        """End it and all that it started."""
        if self._process.stdin:
            with suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(0.5)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill()
            self._process.wait()
            if self._answers >= 0:
                os.close(self._answers)
                self._answers = -1
            self._log.close()

    # --- the pipe ---
    def _send(self, command: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._death() from None

    def answer(self, timeout_s: float = END_S, on_progress: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
        """The answer to what was begun; whoever tells how far it got is alive and may take as long again."""
        while True:
            message = self._read(timeout_s)
            if "progress" in message:
                if on_progress:
                    on_progress(message["progress"])
            elif "answer" in message:
                return message["answer"]
            elif "interrupted" in message:
                raise WorkerFailed("interrupted", "stopped before it was done")
            else:
                facts = message["failure"]
                raise WorkerFailed("exception", f"{facts['type']}: {facts['message']}", facts)

    def _read(self, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            remaining = deadline - time.monotonic()
            if not select.select([self._answers], [], [], max(0.0, min(remaining, LOOK_S)))[0]:
                if self._process.poll() is not None and not select.select([self._answers], [], [], 0)[0]:
                    raise self._death()  # somebody else still holds its end of the pipe, so that no end of file comes
                if remaining <= 0:
                    seen = {"traceback": self.log().strip()[-4000:] or "it printed nothing"}
                    raise WorkerFailed("timeout", f"no sign of life for {timeout_s:.0f} s", seen)
                continue
            chunk = os.read(self._answers, 1 << 16)
            if not chunk:
                raise self._death()
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def _death(self) -> WorkerFailed:
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            code = None
        tail = self.log().strip()[-4000:]
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            why = " (the kernel kills the biggest process when memory runs out)" if name == "SIGKILL" else ""
            return WorkerFailed("killed", f"the process was killed by {name}{why}", {"traceback": tail})
        return WorkerFailed("killed", f"the process ended with exit code {code}", {"traceback": tail or f"exit code {code}"})
