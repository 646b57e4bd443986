"""Where the training thread is, a hundred times a second: which line of the user's code, and what runs below it."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from types import FrameType

import perftrain

INTERVAL_S = 0.01
HELD_S = 0.0035
"""Python lets another thread have the interpreter after 5 ms at the earliest, unless it is told otherwise."""
PROMPT_S = 0.001
"""What it is told for every other look. A look that waits for an operation of torch to let go of the interpreter would blame that
operation for the Python before it."""
_LIBRARIES = tuple(
    os.path.join(os.path.realpath(p), "")
    for p in {*(sysconfig.get_paths()[k] for k in ("stdlib", "platstdlib", "purelib", "platlib")), os.path.dirname(perftrain.__file__)}
)
Place = tuple[str, tuple[tuple[str, int, str], ...], tuple[str, str], str]
"""Phase, the user's frames (file, line, function; innermost first, three at most), innermost frame (file, function), library."""


class Sampler(threading.Thread):
    """Looks at ``thread``; each look counts for the time since the last one that counted.

    Looks are prompt and patient by turns. A prompt one sees the line that runs; a patient one counts only if it came late: then
    Python code ran all the while, and no operation of torch.
    """

    def __init__(self, thread: int, phase: Callable[[], str]) -> None:
        super().__init__(name="perftrain-sampler", daemon=True)
        self._thread_id, self._phase = thread, phase
        self.seen: dict[Place, float] = defaultdict(float)
        self.waited: dict[Place, float] = defaultdict(float)
        """Of it, while the thread used next to no CPU time."""
        self.held: dict[Place, float] = defaultdict(float)
        """Of it, while the thread held the interpreter: this one came late, so Python code ran and not an operation of torch."""
        self._paused = threading.Event()
        self._stopped = threading.Event()
        self._own: dict[str, bool] = {}

    def run(self) -> None:
        clock_id = time.pthread_getcpuclockid(self._thread_id) if hasattr(time, "pthread_getcpuclockid") else None
        woken = last = time.perf_counter()
        last_cpu, prompt = 0.0, False
        while not self._sleep(prompt := not prompt):
            now = time.perf_counter()
            late, woken = now - woken > INTERVAL_S + HELD_S, now
            try:
                cpu = time.clock_gettime(clock_id) if clock_id is not None else 0.0
            except OSError:  # the thread is gone
                return
            if not prompt and not late:
                continue
            if not self._paused.is_set() and (place := self._look()) is not None:
                self.seen[place] += now - last
                self.waited[place] += now - last if cpu - last_cpu < 0.2 * (now - last) else 0.0
                self.held[place] += 0.0 if prompt else 2 * (now - last)  # for the prompt looks at the same place too
            last, last_cpu = now, cpu

    def _sleep(self, prompt: bool) -> bool:
        """Until the next look, or the end."""
        usual_s = sys.getswitchinterval()
        if not prompt:
            return self._stopped.wait(INTERVAL_S)
        sys.setswitchinterval(min(usual_s, PROMPT_S))
        try:
            return self._stopped.wait(INTERVAL_S)
        finally:
            if abs(sys.getswitchinterval() - PROMPT_S) < 1e-6:  # and the program has not set it meanwhile
                sys.setswitchinterval(usual_s)

    def pause(self, paused: bool) -> None:
        (self._paused.set if paused else self._paused.clear)()

    def stop(self) -> None:
        self._stopped.set()

    def _look(self) -> Place | None:
        frame = sys._current_frames().get(self._thread_id)
        if frame is None:
            return None
        code = frame.f_code
        user: list[tuple[str, int, str]] = []
        library = ""
        at: FrameType | None = frame
        while at is not None and len(user) < 3:
            name = at.f_code.co_filename
            if self._is_own(name):
                user.append((name, at.f_lineno or _line_before(at), at.f_code.co_name))
            elif not user:
                library = name
            at = at.f_back
        return self._phase(), tuple(user), (code.co_filename, code.co_name), library

    def _is_own(self, name: str) -> bool:
        known = self._own.get(name)
        if known is None:
            real = os.path.realpath(name)
            known = not name.startswith("<") and not real.startswith(_LIBRARIES) and "site-packages" not in real
            self._own[name] = known
        return known

    def rows(self) -> list[list[object]]:
        """``[phase, user frames, [file, function] of the innermost, library below the user's line, seconds, waited, held]``."""
        items = sorted(self.seen.copy().items(), key=lambda pair: -pair[1])[:400]
        return [[*place, seconds, self.waited[place], self.held[place]] for place, seconds in items]


def _line_before(frame: FrameType) -> int:
    """A jump back to the head of a loop is of no line: then that of the instruction before it."""
    lines = [line for begin, _, line in frame.f_code.co_lines() if line is not None and begin <= frame.f_lasti]
    return lines[-1] if lines else frame.f_code.co_firstlineno
