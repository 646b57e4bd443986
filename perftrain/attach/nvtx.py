"""A look by a profiler of NVIDIA that the program runs under (nsys, ncu): it records the steps named here, with a range for each phase.

Written after their documentation; it has never run on a machine with CUDA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perftrain.facts import PHASE_SPAN, STEP_MARK

if TYPE_CHECKING:
    from perftrain.attach.session import Session


class Ranges:
    """Stands where :class:`perftrain.attach.trace.Trace` does, as only one profiler can listen to the device at a time."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.running = self.taken = False
        self.steps = self._depth = 0
        self.result: dict[str, Any] = {}

    def start(self) -> None:
        import torch

        self.taken = True
        if not torch.cuda.is_available():
            self.result = {"failed": "no CUDA device"}
            return
        torch.cuda.synchronize()  # nothing of the steps before is to be recorded
        torch.cuda.profiler.start()
        torch.cuda.nvtx.mark(STEP_MARK)
        self.session.clock.mark, self.running = self._mark, True

    def _mark(self, phase: str | None) -> None:
        import torch

        if phase is not None:
            torch.cuda.nvtx.range_push(PHASE_SPAN + phase)
            self._depth += 1
        elif self._depth:  # else it began before the recording
            torch.cuda.nvtx.range_pop()
            self._depth -= 1

    def step_done(self) -> None:
        import torch

        self.steps += 1
        torch.cuda.nvtx.mark(STEP_MARK)
        if self.steps >= self.session.orders.profiled_steps:
            self.finish()

    def saw_forward(self, module: Any, args: Any, kwargs: Any, result: Any, seconds: float) -> None:
        """Looking at inputs would itself launch kernels."""

    def finish(self) -> None:
        import torch

        self.running, self.session.clock.mark = False, None
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
