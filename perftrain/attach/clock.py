"""The phase clock: wall time, the training thread's CPU time and the process's CPU time, in disjoint phases that add up."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

REST, EVALUATION, LOSS = "rest", "evaluation", "loss"
NOTHING: Mapping[str, str] = {}
Spent = list[float]
"""Wall seconds, CPU seconds of the training thread, CPU seconds of the process."""


@dataclass
class Row:
    """One step, from the end of the one before to its own end."""

    phases: dict[str, Spent]
    end_s: float
    forwards: int
    backwards: int


@dataclass
class Clock:
    """Seconds by phase. Only the training thread is timed; a phase inside another takes its time away from it.

    Time since the last piece of training is held back (``_gap``) until it is known what it led to: if the next thing is a
    forward pass of evaluation, all of it was evaluation, the fetching of its batches included. What follows a forward pass of
    training, up to the backward pass, is called the loss.
    """

    thread: int = field(default_factory=threading.get_ident)
    rows: list[Row] = field(default_factory=list)
    started_s: float = field(default_factory=time.perf_counter)
    stack: list[str] = field(default_factory=lambda: [REST])
    evaluating: bool = False
    mark: Callable[[str | None], None] | None = None
    """While a trace runs: called with each phase that begins, and with None where one ends."""

    def __post_init__(self) -> None:
        self._wall, self._cpu, self._process = time.perf_counter(), time.thread_time(), time.process_time()
        self._step: dict[str, Spent] = defaultdict(lambda: [0.0, 0.0, 0.0])
        self._gap: dict[str, Spent] = defaultdict(lambda: [0.0, 0.0, 0.0])
        self.forwards = self.backwards = 0

    @property
    def phase(self) -> str:
        return self.stack[-1]

    def here(self) -> bool:
        return threading.get_ident() == self.thread

    def enter(self, phase: str, training: bool = False) -> None:
        """``phase`` begins. ``training``: it is a piece of training, and what went before was its preparation."""
        if training:
            self.training()
        else:
            self._tick()
        self.stack.append(phase)
        if self.mark is not None:
            self.mark(phase)

    def leave(self) -> None:
        self._tick()
        if self.mark is not None:
            self.mark(None)
        if len(self.stack) > 1 and self.stack.pop() == "forward":
            self.stack[0] = LOSS if len(self.stack) == 1 else self.stack[0]

    def training(self) -> None:
        """A piece of training begins: what went before it was its preparation (or the end of an evaluation)."""
        self._tick()
        self._claim({REST: EVALUATION} if self.evaluating else NOTHING)
        self.evaluating = False
        self.stack[0] = REST

    def evaluation(self) -> None:
        """A forward pass of evaluation begins: all since the last training belongs to it."""
        self._tick()
        self._claim(dict.fromkeys(self._gap, EVALUATION))
        self.evaluating = True
        self.stack[0] = REST

    def lap(self, phase: str) -> None:
        """A loop that knows its phases says: what no seam claimed since the last lap was ``phase``."""
        self._tick()
        self._claim({REST: phase, LOSS: phase})
        self.stack[0] = REST

    def end_step(self) -> Row:
        self._tick()
        self._claim(NOTHING)
        row = Row(dict(self._step), self._wall, self.forwards, self.backwards)
        self._step.clear()
        self.forwards = self.backwards = 0
        self.evaluating = False
        self.stack[0] = REST
        self.rows.append(row)
        return row

    def skip(self) -> None:
        """Forget the time since the last event: perftrain itself worked."""
        self._wall, self._cpu, self._process = time.perf_counter(), time.thread_time(), time.process_time()

    def _claim(self, others: Mapping[str, str]) -> None:
        """What was held back belongs to the step, under its phases' own names or under ``others``."""
        for phase, spent in self._gap.items():
            claimed = self._step[others.get(phase, phase)]
            for i in range(3):
                claimed[i] += spent[i]
        self._gap.clear()

    def _tick(self) -> None:
        wall, cpu, process = time.perf_counter(), time.thread_time(), time.process_time()
        spent = self._gap[self.stack[-1]]
        spent[0] += wall - self._wall
        spent[1] += cpu - self._cpu
        spent[2] += process - self._process
        self._wall, self._cpu, self._process = wall, cpu, process
