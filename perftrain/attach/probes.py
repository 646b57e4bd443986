"""Counterfactuals: the program with one thing taken away or switched, in turns with the program as it is.

Turns are blocks of steps of one process, so both sides see the same machine, data and state. The losses of such a run mean
nothing and are not shown; it never saves a checkpoint.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from perftrain.attach import batches
from perftrain.cores import usable_cores
from perftrain.facts import PerftrainError

if TYPE_CHECKING:
    from perftrain.attach.session import Session

BASELINE = "baseline"
WARM_STEPS = 4
WARM = "warm"
LEAST_ROUNDS = 4
"""The first only warms, the others count."""

SETTINGS = ("tf32", "sdpa", "cudnn_benchmark", "deterministic")
"""Switches of the catalogue that are nothing but settings of the process, which stand for as long as the arm's turn lasts."""
ARMS = (
    *SETTINGS, "cached_batches", "short_batches", "no_communication", "no_sync", "amp", "channels_last", "compile", "threads",
    "anomaly_off", "checkpointing_off", "no_gc", "deterministic_off", "unused_gradients_off", "fused", "foreach",
)  # fmt: skip
"""What can be switched between two steps of a program."""


class Turns:
    """Which arm each step belongs to: the baseline and each probe in turn, ``block_steps`` steps each.

    The first step after a change of arms is not counted, nor is a probe's whole first block (it may compile or allocate).
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.kinds: list[str] = []
        self.errors: dict[str, str] = {}
        self.over = False
        self.silent = self.without_recompute = self.cached = self.shorter = False
        self.layout: Any = None
        self.autocast = ""
        order: list[str] = []
        for probe in session.orders.probes:
            order += [probe, BASELINE]
        self._order, self._at, self._in_block, self._round = order, -1, 0, 0
        self._arm = BASELINE
        self._undo, self._base = ExitStack(), ExitStack()
        self._kept: dict[int, Any] = {}
        self._workers: list[Any] = []
        self._compiled: dict[Any, Any] = {}
        self._began = 0.0
        self._arms: dict[str, Callable[[], None]] = {n: getattr(self, f"_arm_{n}") for n in ARMS if n not in SETTINGS}
        self._arms |= {name: partial(self._set_up, name) for name in SETTINGS}

    # --- turns ---
    def step_done(self) -> None:
        """Between two steps: note whose the last one was, and change arms when the block is over."""
        if not self.kinds and self.session.orders.always:
            self._switch_on(self.session.orders.always)
            self._base, self._undo = self._undo, ExitStack()  # these stay on
        if not self._order:
            self.kinds.append(WARM)
            return
        now = time.perf_counter()
        if len(self.kinds) < WARM_STEPS:
            self.kinds.append(WARM)
            return
        counted = self._in_block > 0 and (self._round > 0 or self._arm == BASELINE)
        self.kinds.append(self._arm if counted else WARM)
        self._in_block += 1
        if self._in_block > self.session.orders.block_steps:
            self._change()
        if self._round == 0:
            self._began = now  # a probe's first block may compile: that is not the turns' time
        self.over = self._round >= LEAST_ROUNDS and now - self._began > self.session.orders.probe_s

    def _change(self) -> None:
        self._undo.close()
        self._undo = ExitStack()
        self._at += 1
        if self._at == len(self._order):
            self._at, self._round = 0, self._round + 1
        self._arm, self._in_block = self._order[self._at], 0
        if self._arm != BASELINE and self._arm not in self.errors:
            self._switch_on(self._arm.split("+"))

    def _switch_on(self, names: Sequence[str]) -> None:
        try:
            for name in names:
                self._arms[name]()
        except Exception as error:
            self.errors["+".join(names)] = f"{type(error).__name__}: {error}"
            self._undo.close()

    def close(self) -> None:
        """Back to the program as it is."""
        self._undo.close()
        self._base.close()

    def _set(self, name: str, value: Any) -> None:
        before = getattr(self, name)
        setattr(self, name, value)
        self._undo.callback(setattr, self, name, before)

    # --- what the seams ask ---
    def batch(self, iterator: Any) -> Any:
        """The last batch again instead of a new one, while that is the arm."""
        return self._kept.get(id(iterator)) if self.cached else None

    def keep(self, iterator: Any, batch: Any) -> Any:
        if not self.session.clock.evaluating:
            self._kept = {id(iterator): batch}
            self._workers = list(getattr(iterator, "_workers", ()))
        if self.shorter and (found := batches.longest_of(batch)):
            return batches.shortened(batch, *found)
        return batch

    def inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The inputs of a root module as the arm wants them."""
        if self.layout is not None:
            args = tuple(a.contiguous(memory_format=self.layout) if isinstance(a, torch.Tensor) and a.dim() == 4 else a for a in args)
        return args, kwargs

    def region(self) -> AbstractContextManager[Any]:
        """Around the forward pass of a root module."""
        return torch.autocast(self.autocast, dtype=torch.bfloat16) if self.autocast else nullcontext()

    # --- the arms ---
    def _set_up(self, name: str) -> None:
        from perftrain.opt import all_switches
        from perftrain.opt.seams import Plan

        switch = all_switches()[name]()
        if why := switch.unavailable(Plan(device=torch.device(_device(self.session)))):
            raise PerftrainError(why)
        self._undo.enter_context(switch.process())

    def _arm_cached_batches(self) -> None:
        """The same batch again and again; workers that would fill the queue meanwhile are stopped."""
        self._set("cached", True)
        for worker in self._workers:
            if worker.is_alive():
                os.kill(worker.pid, signal.SIGSTOP)
                self._undo.callback(_continue, worker.pid)

    def _arm_short_batches(self) -> None:
        self._set("shorter", True)

    def _arm_no_communication(self) -> None:
        self._set("silent", True)
        for root in self.session.roots.values():
            if isinstance(root, torch.nn.parallel.DistributedDataParallel):
                before, root.require_backward_grad_sync = root.require_backward_grad_sync, False
                self._undo.callback(setattr, root, "require_backward_grad_sync", before)

    def _arm_no_sync(self) -> None:
        """Gradients of a step are exchanged once, in its last backward pass."""
        expected = max(1, self.session.clock.rows[-1].backwards)
        for root in self.session.roots.values():
            if isinstance(root, torch.nn.parallel.DistributedDataParallel):
                self._sync_last(root, expected)

    def _sync_last(self, root: Any, expected: int) -> None:
        clock, forward = self.session.clock, root.forward

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            root.require_backward_grad_sync = clock.backwards + 1 >= expected
            return forward(*args, **kwargs)

        root.forward = wrapped

        def restore() -> None:
            root.__dict__.pop("forward", None)
            root.require_backward_grad_sync = True

        self._undo.callback(restore)

    def _arm_amp(self) -> None:
        self._set("autocast", _device(self.session))

    def _arm_channels_last(self) -> None:
        self._layout(torch.channels_last)
        self._undo.callback(self._layout, torch.contiguous_format)
        self._set("layout", torch.channels_last)

    def _layout(self, layout: torch.memory_format) -> None:
        changed = {}
        for root in self.session.roots.values():
            for parameter in root.parameters():
                if parameter.dim() == 4:
                    parameter.data = parameter.data.contiguous(memory_format=layout)
                    if parameter.grad is not None:
                        parameter.grad = parameter.grad.contiguous(memory_format=layout)
                    changed[id(parameter)] = parameter
        for optimizer in self.session.optimizers.values():
            for parameter, found in optimizer.state.items():
                state: Any = found
                if id(parameter) in changed:
                    for name, value in list(state.items()):
                        if isinstance(value, torch.Tensor) and value.dim() == 4:
                            state[name] = value.contiguous(memory_format=layout)

    def _arm_compile(self) -> None:
        for root in self.session.roots.values():
            if root not in self._compiled:
                inner = root.module if isinstance(root, torch.nn.parallel.DistributedDataParallel) else root
                self._compiled[root] = torch.compile(inner._call_impl)
            before = root._compiled_call_impl
            root._compiled_call_impl = self._compiled[root]
            self._undo.callback(setattr, root, "_compiled_call_impl", before)

    def _arm_threads(self) -> None:
        """As many threads as cores; one, where it is that many already."""
        before = torch.get_num_threads()
        torch.set_num_threads(usable_cores() if before != usable_cores() else 1)
        self._undo.callback(torch.set_num_threads, before)

    def _arm_anomaly_off(self) -> None:
        before, check = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
        torch.set_anomaly_enabled(False)
        self._undo.callback(torch.set_anomaly_enabled, before, check)

    def _arm_checkpointing_off(self) -> None:
        self._set("without_recompute", True)

    def _arm_no_gc(self) -> None:
        enabled, collect = gc.isenabled(), gc.collect
        gc.disable()
        gc.collect = lambda *_: 0  # type: ignore[assignment]
        self._undo.callback(setattr, gc, "collect", collect)
        if enabled:
            self._undo.callback(gc.enable)

    def _arm_deterministic_off(self) -> None:
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(False)
        self._undo.callback(torch.use_deterministic_algorithms, before)

    def _arm_unused_gradients_off(self) -> None:
        """What no optimizer holds asks for no gradient."""
        for module in (*self.session.roots.values(), *self.session.beside.values()):
            for parameter in module.parameters():
                if parameter.requires_grad and id(parameter) not in self.session.owned:
                    parameter.requires_grad_(False)
                    self._undo.callback(parameter.requires_grad_, True)

    def _arm_fused(self) -> None:
        self._optimizer_flags(fused=True, foreach=False)

    def _arm_foreach(self) -> None:
        self._optimizer_flags(foreach=True)

    def _optimizer_flags(self, **flags: bool) -> None:
        for optimizer in self.session.optimizers.values():
            for group in optimizer.param_groups:
                before = {name: group[name] for name in flags if name in group}
                group.update({name: value for name, value in flags.items() if name in group})
                self._undo.callback(group.update, before)


def _continue(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _device(session: Session) -> str:
    with suppress(StopIteration, AttributeError):
        return next(p.device.type for o in session.optimizers.values() for g in o.param_groups for p in g["params"])
    return "cuda" if torch.cuda.is_available() else "cpu"
