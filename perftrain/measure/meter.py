"""A lap timer for training steps: every moment between two step ends belongs to exactly one phase.

On the CPU a lap reads ``perf_counter``. On a CUDA device it records an event on the current stream, so a phase's time
is the time it is *exposed* on the device's own timeline; events are read later, the loop never waits for them.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from perftrain.facts import PHASES, PerftrainError, StepBreakdown, StepRow
from perftrain.measure.statistics import warmup_cut

T = TypeVar("T")
MAX_PHASES = 16
REST = PHASES.index("rest")
CHECK_EVERY = 64
"""Steps between two looks at the losses; each look waits for the device once."""


class NotFiniteLoss(PerftrainError, FloatingPointError):
    """The loss became NaN or infinite. ``step`` counts from 0."""

    def __init__(self, message: str, step: int = -1) -> None:
        super().__init__(message)
        self.step = step


class Meter:
    """Measures a training loop. On a hand-written loop three lines are enough::

        meter = Meter()                              # 1
        meter.watch(model, optimizer)                # 2  forward, backward and optimizer told apart
        for x, y in meter.steps(loader):             # 3  instead of ``for x, y in loader``
            ...
        print(meter.breakdown())

    Args:
        device: whose timeline is measured; the CPU if not given.
        stop_on_nan: raise :class:`NotFiniteLoss` within ``CHECK_EVERY`` steps of a loss that is not finite.
    """

    def __init__(self, device: torch.device | str = "cpu", stop_on_nan: bool = False) -> None:
        self.device = torch.device(device)
        self.names = list(PHASES)
        self._index = {name: i for i, name in enumerate(PHASES)}
        self._stop_on_nan = stop_on_nan
        self._rows = array("d")
        self._samples = array("q")
        self._row = [0.0] * MAX_PHASES
        self._last = perf_counter()
        self._pending_losses: list[Mapping[str, Tensor] | None] = []
        self._losses: list[dict[str, float] | None] = []
        self._watched: list[Any] = []
        if self.device.type == "cuda":
            self._events = _EventLaps(self)
            self.lap: Callable[[str], None] = self._events.lap
            self._close: Callable[[], None] = self._events.close_step
        else:
            self._events = None
            self.lap = self._lap
            self._close = self._close_step

    # --- the clock ---
    def start(self) -> None:
        """Start the clock of the next step now; time since the last step's end is forgotten."""
        self._row = [0.0] * MAX_PHASES
        self._last = perf_counter()
        if self._events:
            self._events.start()

    def phase_index(self, name: str) -> int:
        if len(self.names) == MAX_PHASES:
            raise PerftrainError(f"A meter holds at most {MAX_PHASES} phases; {name!r} would be one more. Use fewer phase names.")
        self._index[name] = len(self.names)
        self.names.append(name)
        return self._index[name]

    def _lap(self, phase: str) -> None:
        """The time since the last lap belongs to ``phase``."""
        now = perf_counter()
        try:
            self._row[self._index[phase]] += now - self._last
        except KeyError:
            self._row[self.phase_index(phase)] += now - self._last
        self._last = now

    def _close_step(self) -> None:
        now = perf_counter()
        row = self._row
        row[REST] += now - self._last
        self._last = now
        self._rows.extend(row)
        self._row = [0.0] * MAX_PHASES

    def end_step(self, samples: int = 0, losses: Mapping[str, Tensor] | None = None) -> None:
        """Close a step in which ``samples`` samples were trained on; what no lap claimed is ``rest``."""
        self._samples.append(samples)
        self._pending_losses.append({k: v.detach() for k, v in losses.items()} if losses else None)
        if len(self._pending_losses) >= CHECK_EVERY:
            self._read_losses()
        self._close()

    # --- reading ---
    def _read_losses(self) -> None:
        pending, self._pending_losses = self._pending_losses, []
        first = len(self._losses)
        named = {k for losses in pending if losses for k in losses}
        read = {k: iter(torch.stack([p[k].float() for p in pending if p and k in p]).tolist()) for k in named}
        for losses in pending:
            self._losses.append({k: next(read[k]) for k in losses} if losses else None)
        if not self._stop_on_nan:
            return
        for step, losses in enumerate(self._losses[first:], first):
            if losses and not math.isfinite(losses["loss"]):
                raise NotFiniteLoss(f"The loss must stay finite; it was {losses['loss']} at step {step}.", step)

    def __len__(self) -> int:
        return len(self._samples)

    def finish(self) -> None:
        """Read everything still on the device. Waits for it."""
        if self._events:
            self._events.resolve(wait=True)
        self._read_losses()

    def step_s(self) -> list[float]:
        """Seconds of every step so far."""
        if self._events:
            self._events.resolve(wait=True)
        return [sum(self._rows[i : i + MAX_PHASES]) for i in range(0, len(self._rows), MAX_PHASES)]

    def rows(self) -> list[StepRow]:
        """One row a step, phases that never occurred left out."""
        self.finish()
        count = len(self._rows) // MAX_PHASES
        used = [i for i in range(len(self.names)) if any(self._rows[i::MAX_PHASES])]
        return [
            StepRow(
                step=n,
                phase_s={self.names[i]: self._rows[n * MAX_PHASES + i] for i in used},
                samples=self._samples[n],
                loss=(self._losses[n] or {}).get("loss"),
            )
            for n in range(count)
        ]

    def losses(self) -> dict[str, list[float]]:
        """Every logged loss by name, one value for each step that had it."""
        self.finish()
        names = {name for losses in self._losses if losses for name in losses}
        return {name: [losses[name] for losses in self._losses if losses and name in losses] for name in sorted(names)}

    def breakdown(self, skip: int | None = None) -> StepBreakdown:
        """The mean step without its first ``skip`` steps (default: the warm-up, found by :func:`warmup_cut`)."""
        return breakdown_of(self.rows(), skip)

    # --- a hand-written loop ---
    def steps(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches of a loader; one iteration is one step."""
        self.start()
        for batch in batches:
            self.lap("data_wait")
            samples = samples_in(batch)
            try:
                yield batch
            finally:
                self.end_step(samples)

    def watch(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Tell forward, backward and optimizer apart through PyTorch's own hooks, until :meth:`unwatch`.

        Forward ends when gradients first flow back into the model's output, so the loss counts as forward.
        """

        def begin(*_: Any) -> None:
            self.lap("rest")

        def forward_done(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self.lap("forward")
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(lambda _grad: self.lap("forward"))
                    break

        self._watched += [
            model.register_forward_pre_hook(begin),
            model.register_forward_hook(forward_done),
            optimizer.register_step_pre_hook(lambda *_: self.lap("backward")),
            optimizer.register_step_post_hook(lambda *_: self.lap("optimizer")),
        ]

    def unwatch(self) -> None:
        while self._watched:
            self._watched.pop().remove()


class _EventLaps:
    """The CUDA side of a meter: laps are events, turned into seconds once the device has passed them."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._stream = torch.cuda.current_stream(meter.device)
        self._marks: list[tuple[int, torch.cuda.Event]] = []
        self._steps: deque[list[tuple[int, torch.cuda.Event]]] = deque()
        self._before: torch.cuda.Event | None = None

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._meter.device))
        return event

    def start(self) -> None:
        self.resolve(wait=True)
        self._marks, self._before = [], self._event()

    def lap(self, phase: str) -> None:
        index = self._meter._index.get(phase)
        self._marks.append((self._meter.phase_index(phase) if index is None else index, self._event()))

    def close_step(self) -> None:
        self._marks.append((REST, self._event()))
        self._steps.append(self._marks)
        self._marks = []
        if len(self._steps) > CHECK_EVERY and self._steps[0][-1][1].query():
            self.resolve(wait=False)

    def resolve(self, wait: bool) -> None:
        if wait and self._steps:
            self._steps[-1][-1][1].synchronize()
        while self._steps and self._steps[0][-1][1].query():
            row = [0.0] * MAX_PHASES
            for index, event in self._steps.popleft():
                if self._before is not None:
                    row[index] += self._before.elapsed_time(event) * 1e-3
                self._before = event
            self._meter._rows.extend(row)


def samples_in(batch: Any) -> int:
    """Samples in a batch: the first dimension of the first tensor found in it (0 where there is none)."""
    if isinstance(batch, (tuple, list)) and batch and isinstance(batch[0], Tensor):
        return batch[0].shape[0] if batch[0].dim() else 1
    values = vars(batch) if hasattr(batch, "__dataclass_fields__") else batch
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            return leaf.shape[0] if leaf.dim() else 1
    return 0


def breakdown_of(rows: list[StepRow], skip: int | None = None) -> StepBreakdown:
    """The mean of ``rows`` after the first ``skip`` (default: the warm-up)."""
    if not rows:
        return StepBreakdown(phase_s={}, steps=0, samples=0)
    if skip is None:
        skip = warmup_cut([row.step_s for row in rows])
    kept = rows[min(skip, len(rows) - 1) :]
    names = list(dict.fromkeys(name for row in kept for name in row.phase_s))
    means = {name: sum(row.phase_s.get(name, 0.0) for row in kept) / len(kept) for name in names}
    return StepBreakdown(phase_s=means, steps=len(kept), samples=sum(row.samples for row in kept))
