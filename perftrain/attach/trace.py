"""A look at single operations: torch.profiler over a few steps, read at once into sums by operation."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from perftrain.attach import batches

if TYPE_CHECKING:
    from perftrain.attach.session import Session

LEAST_STEPS, ENOUGH_S, MOST_STEPS = 2, 0.5, 20
PHASE_SPAN = "perftrain::"
COMPILED = ("CompiledFxGraph",)
LAYOUT = ("aten::contiguous", "aten::clone")
TINY_S = 20e-6
"""An operation shorter than this costs about as much to launch as to do."""


class Trace:
    """Started and stopped between steps; the steps it covers are not timed ones."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.running = self.taken = False
        self._open: list[Any] = []
        self.steps, self._began = 0, 0.0
        self.result: dict[str, Any] = {}
        self._profiler: Any = None
        self._forwards: list[dict[str, Any]] = []
        self._inputs: list[dict[str, Any]] = []
        self._last: tuple[Any, Any] = ((), {})

    def start(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self.taken = True
        try:
            activities = [ProfilerActivity.CPU]
            import torch

            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profiler = profile(activities=activities, record_shapes=True, with_flops=True, profile_memory=True)
            self._profiler.__enter__()
        except RuntimeError as error:  # the program profiles itself
            self.result = {"failed": str(error)}
            return
        self.session.clock.mark = self._mark
        self.running, self._began = True, time.perf_counter()

    def _mark(self, phase: str | None) -> None:
        """A span for each phase, so that operations can be told by phase."""
        from torch.profiler import record_function

        if phase is None:
            if self._open:
                self._open.pop().__exit__(None, None, None)
        else:
            self._open.append(record_function(PHASE_SPAN + phase).__enter__())

    def step_done(self) -> None:
        self.steps += 1
        args, kwargs = self._last
        self._inputs.append(batches.padding(args, kwargs))
        if self.steps == 1:
            self.result["memory"] = batches.memory(self.session.optimizers.values(), self.session.roots.values())
            self.result["gradients"] = batches.gradients(self.session.optimizers.values(), self.session.roots.values())
        spent = time.perf_counter() - self._began
        if self.steps >= MOST_STEPS or (self.steps >= LEAST_STEPS and spent > ENOUGH_S):
            self.finish()

    def saw_forward(self, module: Any, args: Any, kwargs: Any, result: Any, seconds: float) -> None:
        """A root module's call: its inputs, and whether any gradient ever comes back through its outputs."""
        if not self.running:
            return
        self._last = (args, kwargs)
        outputs = [t for t in batches.tensors(result) if t.requires_grad and t.grad_fn is not None]
        if outputs:
            seen = {"module": type(module).__name__, "seconds": seconds, "used": False}
            self._forwards.append(seen)
            for tensor in outputs:
                tensor.register_hook(lambda _, seen=seen: seen.update(used=True))

    def finish(self) -> None:
        self.running, self.session.clock.mark = False, None
        wall_s = time.perf_counter() - self._began
        try:
            self._profiler.__exit__(None, None, None)
            events = self._profiler.profiler.kineto_results.events()
        except Exception as error:
            self.result["failed"] = str(error)
            return
        self.result.update(
            steps=max(1, self.steps), wall_s=wall_s, **by_operation(events), forwards=self._forwards, inputs=[i for i in self._inputs if i]
        )
        self._profiler = None
        self._last = ((), {})


def by_operation(events: Any) -> dict[str, Any]:
    """Own time, calls, FLOP by phase, operation and dtype; how much of it is in operations of a few microseconds."""
    spans = defaultdict(list)
    device: dict[str, float] = defaultdict(float)
    allocated: list[tuple[int, int]] = []
    for event in events:
        if event.name() == "[memory]":
            allocated.append((event.start_ns(), event.nbytes()))
        elif "CUDA" in str(event.device_type()):
            device[event.name()] += event.duration_ns() / 1e9
        else:
            spans[event.start_thread_id()].append((event.start_ns(), -event.duration_ns(), event))
    ops: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0, 0, 0.0])
    for thread in spans.values():
        thread.sort(key=lambda span: span[:2])
        _own_times(thread, ops)
    phases = {name.removeprefix(PHASE_SPAN): 0.0 for _, name, _ in ops if name.startswith(PHASE_SPAN)}
    rows = [[name, dtype, *values, phase] for (phase, name, dtype), values in ops.items() if not name.startswith(PHASE_SPAN)]
    rows.sort(key=lambda row: -row[3])
    for thread in spans.values():
        for _, negative, event in thread:
            if event.name().startswith(PHASE_SPAN):
                phases[event.name().removeprefix(PHASE_SPAN)] -= negative / 1e9
    return {
        "transient_bytes": _peak(allocated), "operations": rows[:200], "phase_s": phases, "device_s": dict(device),
        "compiled_s": sum(_inside(t, COMPILED) for t in spans.values()), "layout_s": sum(_inside(t, LAYOUT) for t in spans.values()),
    }  # fmt: skip


def _peak(allocated: list[tuple[int, int]]) -> int:
    """The most that was allocated at once above what was there at the beginning."""
    now = most = 0
    for _, size in sorted(allocated):
        now += size
        most = max(most, now)
    return most


def _inside(thread: list[tuple[int, int, Any]], words: tuple[str, ...]) -> float:
    """Seconds inside spans with one of these words in their names."""
    total, until = 0, 0
    for start, negative, event in thread:
        if start >= until and any(word in event.name() for word in words):
            total, until = total - negative, start - negative
    return total / 1e9


def _own_times(thread: list[tuple[int, int, Any]], ops: dict[tuple[str, str, str], list[float]]) -> None:
    """Add each span's time without that of the spans inside it, under the innermost phase around it."""
    open_spans: list[list[Any]] = []  # end, own ns, event, phase

    def close() -> None:
        _, own_ns, event, phase = open_spans.pop()
        dtype = next((d for d in event.dtypes() if d not in ("", "Scalar", "long int")), "") if hasattr(event, "dtypes") else ""
        row = ops[(phase, event.name(), dtype)]
        own_s = max(0, own_ns) / 1e9
        row[0] += 1
        row[1] += own_s
        row[2] += event.flops() or 0
        if own_s < TINY_S:
            row[3] += 1
            row[4] += own_s

    for start, negative, event in thread:
        while open_spans and start >= open_spans[-1][0]:
            close()
        if open_spans:
            open_spans[-1][1] += negative
        name = event.name()
        around = open_spans[-1][3] if open_spans else "rest"
        open_spans.append([start - negative, -negative, event, name.removeprefix(PHASE_SPAN) if name.startswith(PHASE_SPAN) else around])
    while open_spans:
        close()
