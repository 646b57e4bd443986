"""Activation checkpointing: compute a block's activations again in backward instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from perftrain.facts import Bottleneck, Card, Gain, Numerics, PerftrainError, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import Plan, StepFunctions, repeated_blocks

MODES = ("full", "selective", "budget")
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Checkpointing(Switch):
    """Keep only the input of each repeated block and compute the rest again when backward needs it.

    Pays where activations do not fit the memory. It costs time: about one more forward pass with ``full``, less with
    ``selective``, which keeps the outputs of matrix products, convolutions and attention and computes the cheap rest again.
    ``budget`` lets torch.compile choose what to keep within ``budget`` (0..1) of the memory (needs compile). Dropout draws the
    same numbers again, batch normalization counts each batch once, so losses are the same bit for bit. Modules that change
    buffers of their own in forward (spectral normalization) would do so twice: not for those. Source: torch.utils.checkpoint;
    Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
    """

    mode: str = "full"
    every: int = 1
    """Every so many-th block (full and selective)."""
    budget: float = 0.5
    """Part of the activation memory that may be kept (budget)."""

    card: ClassVar[Card] = Card(
        name="checkpointing",
        summary="compute activations again in backward instead of keeping them",
        place=Place.CHECKPOINTING,
        numerics=Numerics.EXACT,
        relieves=(Bottleneck.MEMORY_CAPACITY,),
        requires=("a model that repeats blocks (full, selective), or compile (budget)",),
        cost="time: up to one more forward pass in every step",
    )

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise PerftrainError(f"checkpointing.mode is one of {', '.join(MODES)}; it was {self.mode!r}. Try opt.checkpointing.mode=full.")
        if self.every < 1:
            raise PerftrainError(f"checkpointing.every is 1 or more; it was {self.every}. Try opt.checkpointing.every=1.")
        if not 0 <= self.budget <= 1:
            raise PerftrainError(f"checkpointing.budget lies between 0 and 1; it was {self.budget}. Try opt.checkpointing.budget=0.5.")

    def unfit(self, workload: Mapping[str, Any]) -> str:
        return "the model repeats no blocks" if self.mode != "budget" and workload.get("blocks") == 0 else ""

    def predict(self, now: StepBreakdown) -> Gain:
        return Gain(1.0, 1.0, "it saves memory, not time")

    def process(self) -> AbstractContextManager[Any]:
        if self.mode != "budget":
            return nullcontext()
        from torch._functorch import config

        return config.patch(activation_memory_budget=self.budget)  # type: ignore[attr-defined]

    def model(self, model: nn.Module, plan: Plan) -> nn.Module:
        if self.mode == "budget":
            return model
        blocks = repeated_blocks(model)[self.every - 1 :: self.every]
        if not blocks:
            raise PerftrainError(
                f"checkpointing wraps the blocks that a model repeats; {type(model).__name__} has none, or fewer than every={self.every}. "
                "Leave the switch out."
            )
        classes = {cls: checkpointed(cls, self.mode) for cls in {type(block) for block in blocks}}
        for block in blocks:
            if "forward" in vars(block):
                raise PerftrainError(
                    f"checkpointing subclasses the repeated blocks; a {type(block).__name__} has a forward of its own, put there by hand, "
                    "which would hide that. Leave the switch out."
                )
            block.__class__ = classes[type(block)]
        return model

    def step(self, functions: StepFunctions) -> StepFunctions:
        compiled = any(module._compiled_call_impl is not None for module in functions.model.modules())
        if self.mode == "budget" and not compiled:
            raise PerftrainError("checkpointing.mode=budget is planned by torch.compile, which is off. Try +opt=[checkpointing,compile].")
        return functions


def checkpointed(cls: type[nn.Module], mode: str) -> type[nn.Module]:
    """A subclass whose forward is checkpointed: parameters keep their names, and a copy of a block is a block of its own."""

    def forward(self: nn.Module, *inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return cls.forward(self, *inputs, **named)
        if not torch.compiler.is_compiling():
            return checkpoint(cls.forward, self, *inputs, use_reentrant=False, context_fn=contexts_of(self, mode), **named)
        # what is traced updates statistics once, and the compiler knows selective contexts only
        if mode == "selective":
            return checkpoint(cls.forward, self, *inputs, use_reentrant=False, context_fn=selective, **named)
        return checkpoint(cls.forward, self, *inputs, use_reentrant=False, **named)

    return type(f"Checkpointed{cls.__name__}", (cls,), {"forward": forward})


def contexts_of(block: nn.Module, mode: str) -> Callable[[], Contexts]:
    """Makes the contexts of the first computation and of the second."""
    norms = [m for m in block.modules() if isinstance(m, _NormBase) and m.track_running_stats]

    def make() -> Contexts:
        first, second = selective() if mode == "selective" else plain()
        return first, _both(second, uncounted(norms))

    return make if norms else selective if mode == "selective" else plain


def plain() -> Contexts:
    return nullcontext(), nullcontext()


def selective() -> Contexts:
    return create_selective_checkpoint_contexts(expensive())  # type: ignore[arg-type]


def expensive() -> list[Any]:
    """Operators whose outputs are worth keeping."""
    aten = torch.ops.aten
    products = ("mm", "addmm", "bmm", "baddbmm", "convolution")
    kernels = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    names = [*products, *(f"_scaled_dot_product_{kernel}" for kernel in kernels)]
    return [getattr(aten, name).default for name in names if hasattr(aten, name)]


@contextmanager
def _both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(first)
        stack.enter_context(second)
        yield


@contextmanager
def uncounted(norms: list[_NormBase]) -> Iterator[None]:
    """Normalization layers leave their running statistics as they are: this batch has been counted."""
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    try:
        for norm in norms:
            norm.momentum, norm.num_batches_tracked = 0.0, None
        yield
    finally:
        for norm, (momentum, tracked) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, tracked
