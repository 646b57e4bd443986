"""A lap timer for training steps: every moment between two step ends belongs to exactly one phase.

On the CPU a lap reads ``perf_counter``. On a CUDA device it records an event on the current stream, so a phase's time
is the time it is *exposed* on the device's own timeline; events are read later, the loop never waits for them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from perftrain.facts import PHASES, PerftrainError, StepBreakdown, StepRow
from perftrain.measure.losses import Averaging, LossLog
from perftrain.measure.statistics import warmup_cut

T = TypeVar("T")
MAX_PHASES = 16
REST = PHASES.index("rest")
_END = "end of step"
CHECK_EVERY = 64
"""Steps between two looks at the losses, if nothing else is asked for."""
FOLD_EVERY = 1024
"""Steps between two foldings of marks into rows on the CPU: between kernels each costs half a millisecond, hot a twentieth."""


class Meter:
    """Measures a training loop. On a hand-written loop three lines are enough::

        meter = Meter()                              # 1
        meter.watch(model, optimizer)                # 2  forward, backward and optimizer told apart
        for x, y in meter.steps(loader):             # 3  instead of ``for x, y in loader``
            ...
        print(meter.breakdown())

    A lap only notes the clock; marks become rows now and then, because code that runs between kernels finds
    the caches cold and costs several times what it costs in a row.

    Args:
        device: whose timeline is measured; the CPU if not given.
        stop_on_nan: raise ``NotFiniteLoss`` within ``check_every`` steps of a loss that is not finite.
        ranks: averages losses over several processes that train together, each time they are checked.
        check_every: steps between two looks at the losses; each look waits for the device once.
        on_look: called after each of these looks with the meter; its time is the phase ``logging`` of the step that begins.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        stop_on_nan: bool = False,
        ranks: Averaging | None = None,
        check_every: int = CHECK_EVERY,
        on_look: Callable[[Meter], None] | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.names = list[str](PHASES)
        self._index = {name: i for i, name in enumerate(PHASES)} | {_END: REST}
        self._ranks = ranks if ranks is not None and ranks.size > 1 else None
        self._rows = array("d")
        self._samples = array("q")
        self._check_every, self._on_look = check_every, on_look
        self._before: Any = None
        self._watched: list[Any] = []
        self._on_device = self.device.type == "cuda"
        self._log = LossLog(self._on_device, stop_on_nan, self._ranks)
        self._phases: list[str] = []
        self._marks: Any = [] if self._on_device else array("d")
        now = self._event if self._on_device else perf_counter
        note_mark, note_phase = self._marks.append, self._phases.append

        def lap(phase: str) -> None:
            """The time since the last lap belongs to ``phase``."""
            note_mark(now())
            note_phase(phase)

        self.lap: Callable[[str], None] = lap
        self._now: Callable[[], Any] = now
        self.start()

    # --- the clock ---
    def start(self) -> None:
        """Start the clock of the next step now; time since the last step's end is forgotten."""
        self._fold(wait=True)
        del self._marks[:], self._phases[:]
        self._before = self._now()

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def end_step(self, samples: int = 0, losses: Mapping[str, Tensor] | None = None) -> None:
        """Close a step in which ``samples`` samples were trained on; what no lap claimed is ``rest``."""
        self._samples.append(samples)
        count = len(self._samples)
        if losses is not None:
            self._log.add(count - 1, losses)
        look = count % self._check_every == 0
        if look:
            self._log.read()
            self._log.check()
            if self._on_device or count % FOLD_EVERY < self._check_every:
                self._fold(wait=False)
        self.lap(_END)
        if look and self._on_look is not None:
            self._on_look(self)
            self.lap("logging")

    def _fold(self, wait: bool) -> None:
        """Turn the marks of finished steps into rows. On a device only of those that it has passed, unless told to wait."""
        ends = self._passed(wait)
        if not ends:
            return
        count = ends[-1] + 1
        columns = [self._index.get(phase) or self._column(phase) for phase in self._phases[:count]]
        marks = self._marks[:count]
        if self._on_device:
            seconds = [1e-3 * before.elapsed_time(mark) for before, mark in zip([self._before, *marks], marks, strict=False)]
        else:
            seconds = np.diff(marks, prepend=self._before)
        rows = np.zeros((len(ends), MAX_PHASES))
        np.add.at(rows, (np.searchsorted(ends, np.arange(count)), np.array(columns)), seconds)
        self._rows.frombytes(rows.tobytes())
        self._before = marks[-1]
        del self._marks[:count], self._phases[:count]

    def _passed(self, wait: bool) -> list[int]:
        """Where in the marks each finished step ends."""
        ends = [i for i, phase in enumerate(self._phases) if phase is _END]
        if self._on_device and ends:
            if wait:
                self._marks[ends[-1]].synchronize()
            while ends and not self._marks[ends[-1]].query():
                ends.pop()
        return ends

    def _column(self, name: str) -> int:
        index = self._index.get(name)
        if index is None:
            if len(self.names) == MAX_PHASES:
                raise PerftrainError(f"A meter holds at most {MAX_PHASES} phases; {name!r} would be one more. Use fewer names.")
            index = self._index[name] = len(self.names)
            self.names.append(name)
        return index

    # --- reading ---
    def __len__(self) -> int:
        return len(self._samples)

    def finish(self) -> None:
        """Read everything still on the device. Waits for it, and for the other ranks where there are any."""
        self._fold(wait=True)
        self._log.read()
        self._log.check()

    def _settle(self) -> None:
        """The same before somebody reads; without the other ranks, as this one may be asking alone."""
        if self._ranks is None:
            self.finish()
        else:
            self._fold(wait=True)
            self._log.read()

    def step_s(self) -> list[float]:
        """Seconds of every step so far."""
        self._fold(wait=True)
        return [sum(self._rows[i : i + MAX_PHASES]) for i in range(0, len(self._rows), MAX_PHASES)]

    def rows(self) -> list[StepRow]:
        """One row a step, phases that never occurred left out."""
        self._settle()
        return self._rows_from(0)

    def passed(self, start: int) -> list[StepRow]:
        """The same from step ``start`` on, as far as it is known without waiting for the device: for those who look on."""
        self._fold(wait=False)
        return self._rows_from(start)

    def _rows_from(self, start: int) -> list[StepRow]:
        cells, losses = self._rows[start * MAX_PHASES :], self._log.by_step(start)
        used = [i for i in range(len(self.names)) if any(cells[i::MAX_PHASES])]
        return [
            StepRow(
                step=start + n,
                phase_s={self.names[i]: cells[n * MAX_PHASES + i] for i in used},
                samples=self._samples[start + n],
                loss=losses.get(start + n),
            )
            for n in range(len(cells) // MAX_PHASES)
        ]

    def losses(self) -> dict[str, list[float]]:
        """Every logged loss by name, one value for each step that had it."""
        self._settle()
        return self._log.by_name()

    def mean_losses(self, start: int) -> dict[str, float]:
        """Every loss by name, averaged over the steps from ``start`` on, as far as they are known without waiting."""
        return self._log.means(start)

    def latest_loss(self) -> float | None:
        """The last loss that is known without waiting."""
        return self._log.latest()

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

        Forward is the model's call; the loss that you compute from its output counts as backward.
        """
        lap = self.lap
        self._watched += [
            model.register_forward_pre_hook(lambda *_: lap("rest")),
            model.register_forward_hook(lambda *_: lap("forward")),
            optimizer.register_step_pre_hook(lambda *_: lap("backward")),
            optimizer.register_step_post_hook(lambda *_: lap("optimizer")),
        ]

    def unwatch(self) -> None:
        while self._watched:
            self._watched.pop().remove()


def samples_in(batch: Any) -> int:
    """Samples in a batch: the first dimension of the first tensor found in it (0 where there is none)."""
    if isinstance(batch, (tuple, list)) and batch and isinstance(batch[0], Tensor):
        shape = batch[0].shape
        return shape[0] if shape else 1
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
