"""torch's own entry points, with a clock at each: batches, forward passes, backward, optimizers, saving, collectives.

Every patch calls what it replaces with the same arguments and returns the same result; nothing here changes a number.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from threading import get_ident
from typing import TYPE_CHECKING, Any

from perftrain.attach.loader_seams import open_loaders

if TYPE_CHECKING:
    from perftrain.attach.session import Session

COLLECTIVES = (
    "all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor",
    "reduce", "all_to_all", "all_to_all_single", "barrier", "gather", "scatter", "send", "recv", "monitored_barrier",
)  # fmt: skip

OUTSIDE = ("rest", "loss", "optimizer")
"""Phases in which a module that is called is a root (an optimizer's closure runs inside its step)."""


def lay_open(session: Session) -> None:
    """Put a clock at every seam of torch in this process."""
    import torch

    _modules(session, torch)
    _backward(session, torch)
    _optimizers(session, torch)
    open_loaders(session)
    _saving(session, torch)
    _collectives(session, torch)
    _extras(session, torch)


def _timed(session: Session, phase: str, original: Callable[..., Any], also: Callable[..., None] | None = None) -> Callable[..., Any]:
    """``original`` in ``phase``, when the training thread calls it and is not in that phase already."""
    from torch.compiler import is_compiling

    @functools.wraps(original)
    def timed(*args: Any, **kwargs: Any) -> Any:
        clock = session.clock
        if is_compiling() or clock.thread != get_ident() or clock.stack[-1] == phase:
            return original(*args, **kwargs)
        if also is not None:
            also(*args, **kwargs)
        clock.enter(phase, training=phase == "backward")
        try:
            return original(*args, **kwargs)
        finally:
            clock.leave()

    return timed


# --- model ---
def _modules(session: Session, torch: Any) -> None:
    original = torch.nn.Module.__call__
    grad_enabled = torch.is_grad_enabled
    trained: set[int] = set()

    known: weakref.WeakKeyDictionary[Any, tuple[int, bool]] = weakref.WeakKeyDictionary()

    def owns(module: Any) -> bool:
        """Whether an optimizer holds any of its parameters."""
        size = len(session.owned)
        found = known.get(module)
        if found is None or found[0] != size:
            held = session.owned
            asking = [id(p) for p in module.parameters() if p.requires_grad]
            found = known[module] = (size, any(p in held for p in asking) if held else bool(asking))
            if asking and not found[1] and grad_enabled():
                session.beside[id(module)] = module
        return found[1]

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        clock = session.clock
        stack = clock.stack
        top = stack[-1]
        if top not in OUTSIDE or clock.thread != get_ident():
            return original(self, *args, **kwargs)
        own = owns(self)
        if grad_enabled() and (self.training or not own or id(self) not in trained):
            if own:
                trained.add(id(self))
                session.roots[id(self)] = self
            clock.forwards += own
            clock.enter("forward", training=True)
            if session.trace.running or session.turns is not None:
                return _closer(session, original, self, args, kwargs)
        elif own or clock.evaluating:
            clock.evaluation()
            clock.enter("evaluation")
        else:
            clock.enter("forward")  # a frozen teacher, a target network
        try:
            return original(self, *args, **kwargs)
        finally:
            clock.leave()

    torch.nn.Module.__call__ = call
    _not_compiled(torch, call)


def _not_compiled(torch: Any, function: Any) -> None:
    """Dynamo is not to compile this frame, only what it calls: as it does with torch's own ``Module.__call__``.

    Told when the program first asks for a compiler: importing Dynamo takes seconds, and most programs never do.
    """
    original = torch.compile

    @functools.wraps(original)
    def compile(*args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.eval_frame import skip_code

        skip_code(function.__code__)
        return original(*args, **kwargs)

    torch.compile = compile


def _closer(session: Session, original: Any, module: Any, args: Any, kwargs: Any) -> Any:
    """A forward pass while a trace runs or arms take turns."""
    try:
        turns = session.turns
        if turns is not None:
            args, kwargs = turns.inputs(args, kwargs)
        began = time.perf_counter()
        with turns.region() if turns is not None else nullcontext():
            result = original(module, *args, **kwargs)
        session.trace.saw_forward(module, args, kwargs, result, time.perf_counter() - began)
        return result
    finally:
        session.clock.leave()


def _backward(session: Session, torch: Any) -> None:
    def begins(*given: Any, **_: Any) -> None:
        session.clock.backwards += 1
        if len(session.losses) < session.orders.losses and given and isinstance(given[0], torch.Tensor) and given[0].numel() == 1:
            session.losses.append(given[0].detach().clone())

    for name in ("backward", "grad"):
        setattr(torch.autograd, name, _timed(session, "backward", getattr(torch.autograd, name), begins))
    timed = torch.autograd.backward

    @functools.wraps(timed)
    def backward(*args: Any, **kwargs: Any) -> None:
        timed(*args, **kwargs)
        if session.anchor is None and not session.optimizers and session.clock.thread == get_ident():
            session.went_back()

    torch.autograd.backward = backward


# --- optimizer ---
def _optimizers(session: Session, torch: Any) -> None:
    from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    def before(optimizer: Any, *_: Any) -> None:
        if session.clock.thread == get_ident():
            session.saw_optimizer(optimizer)
            session.clock.enter("optimizer", training=True)

    def after(optimizer: Any, *_: Any) -> None:
        if session.clock.thread == get_ident():
            session.clock.leave()
            session.stepped(optimizer)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
    init = Optimizer.__init__

    @functools.wraps(init)
    def remembered(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        session.saw_optimizer(self)

    Optimizer.__init__ = remembered
    Optimizer.zero_grad = _timed(session, "optimizer", Optimizer.zero_grad)  # type: ignore[method-assign]
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        clip = _timed(session, "optimizer", getattr(torch.nn.utils, name))
        setattr(torch.nn.utils, name, clip)
        setattr(torch.nn.utils.clip_grad, name, clip)


# --- the rest of a step ---
def _saving(session: Session, torch: Any) -> None:
    original = torch.save

    @functools.wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        session.counts["saves"] += 1
        return original(*args, **kwargs) if session.orders.saving else None

    torch.save = _timed(session, "checkpoint", save)


def _collectives(session: Session, torch: Any) -> None:
    import torch.distributed as dist

    if not dist.is_available():
        return

    def counted(name: str) -> Callable[..., None]:
        def count(*args: Any, **kwargs: Any) -> None:
            tensor = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)), None)
            session.counts["collectives"] += name != "barrier"
            session.sums["collective_bytes"] += tensor.numel() * tensor.element_size() if tensor is not None else 0

        return count

    for name in COLLECTIVES:
        if hasattr(dist, name):
            original = getattr(dist, name)
            timed = _timed(session, "communication", _skippable(session, original), counted(name))
            setattr(dist, name, timed)
            setattr(dist.distributed_c10d, name, timed)


def _skippable(session: Session, original: Any) -> Any:
    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        if session.turns is not None and session.turns.silent:
            return None
        return original(*args, **kwargs)

    return collective


def _extras(session: Session, torch: Any) -> None:
    """Features that cost time by themselves: they are counted where they are used."""
    import torch.utils.checkpoint as checkpointing
    from torch.compiler import is_compiling

    original = checkpointing.checkpoint

    @functools.wraps(original)
    def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(function, *args, **kwargs)
        session.counts["recomputed_blocks"] += 1
        if session.turns is not None and session.turns.without_recompute:
            for name in ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop"):
                kwargs.pop(name, None)
            return function(*args, **kwargs)
        return original(function, *args, **kwargs)

    checkpointing.checkpoint = checkpoint
    if threads := session.orders.threads:
        torch.set_num_threads(threads)
        torch.set_num_threads = lambda number: None
    if offset := session.orders.seed_offset:
        seeded = torch.manual_seed
        torch.manual_seed = lambda seed: seeded(int(seed) + offset)
    if torch.cuda.is_available():
        torch.cuda.synchronize = _timed(session, "sync", torch.cuda.synchronize)
