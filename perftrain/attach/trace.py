"""A look at single operations: torch.profiler over a few steps, read at once into sums by operation."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from perftrain.attach import batches
from perftrain.attach.operations import by_operation, memory_of_a_step
from perftrain.facts import PHASE_SPAN, STEP_MARK

if TYPE_CHECKING:
    from perftrain.attach.session import Session

LEAST_STEPS, ENOUGH_S, MOST_STEPS = 2, 0.5, 20


class Trace:
    """Started and stopped between steps; the steps it covers are not timed ones."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.running = self.taken = False
        self._open: list[Any] = []
        self.steps, self._began = 0, 0.0
        self.result: dict[str, Any] = {}
        self._profiler: Any = None
        self._forwards: list[tuple[dict[str, Any], list[Any]]] = []
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
            self._profiler = profile(activities=activities, record_shapes=True, profile_memory=True)
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
        from torch.profiler import record_function

        with record_function(STEP_MARK):
            self.steps += 1
        args, kwargs = self._last
        self._inputs.append(batches.padding(args, kwargs))
        if self.steps == 1:
            optimizers, roots, beside = self._made_of()
            self.result["memory"] = batches.memory(optimizers, [*roots, *beside])
            self.result["gradients"] = batches.gradients(optimizers, roots, beside)
        spent = time.perf_counter() - self._began
        if self.steps >= MOST_STEPS or (self.steps >= LEAST_STEPS and spent > ENOUGH_S):
            self.finish()

    def _made_of(self) -> tuple[list[Any], list[Any], list[Any]]:
        session = self.session
        return list(session.optimizers.values()), list(session.roots.values()), list(session.beside.values())

    def _updated_by_hand(self) -> None:
        """Parameters that no optimizer holds and that have changed: somebody does use their gradients."""
        first = self.result.get("gradients")
        if first and (self.steps < 2 or batches.gradients(*self._made_of())["unused_sum"] != first["unused_sum"]):
            first.update(unused_share=0.0, unused=[])

    def saw_forward(self, module: Any, args: Any, kwargs: Any, result: Any, seconds: float) -> None:
        """A root module's call: its inputs, and whether any gradient ever comes back through its outputs."""
        if not self.running:
            return
        self._last = (args, kwargs)
        outputs = [t for t in batches.tensors(result) if t.requires_grad and t.grad_fn is not None]
        if outputs:
            seen = {"module": type(module).__name__, "seconds": seconds}
            came: list[Any] = []
            self._forwards.append((seen, came))
            for tensor in outputs:  # a number of the device is looked at when the trace is over
                tensor.register_hook(lambda g, came=came: came.append(g.detach().any() if str(g.layout) == "torch.strided" else True))

    @staticmethod
    def _told(seen: dict[str, Any], came: list[Any]) -> dict[str, Any]:
        """``used``: a gradient came back; ``zero``: it did, and was all zeros."""
        used = any(bool(found) for found in came)
        return {**seen, "used": used, "zero": bool(came) and not used}

    def finish(self) -> None:
        self.running, self.session.clock.mark = False, None
        wall_s = time.perf_counter() - self._began
        self._updated_by_hand()
        try:
            self._profiler.__exit__(None, None, None)
            events = self._profiler.profiler.kineto_results.events()
        except Exception as error:
            self.result["failed"] = str(error)
            return
        events = list(events)
        self.result.update(
            steps=max(1, self.steps),
            wall_s=wall_s,
            **by_operation(events),
            forwards=[self._told(*f) for f in self._forwards],
            inputs=[i for i in self._inputs if i],
        )
        self.result["memory"] = {**self.result.get("memory", {}), **memory_of_a_step(events)}
        self._profiler = None
        self._last = ((), {})
