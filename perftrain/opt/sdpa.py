"""One kernel for attention, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from perftrain.facts import Bottleneck, Card, Gain, Numerics, PerftrainError, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import Batch, Losses, Plan, StepFunctions, attention_layers

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
ON_CPU = ("flash", "math")


@dataclass(frozen=True)
class SDPA(Switch):
    """Let only ``backend`` compute ``F.scaled_dot_product_attention`` (``torch.nn.attention.sdpa_kernel``).

    torch takes the first kernel of its own order that can do what is asked; this switch tells whether another one is faster
    here. ``flash`` and ``cudnn`` want 16-bit types on CUDA (add amp), ``efficient`` also float32; a CPU has ``flash`` and
    ``math``. ``math`` is the control: plain matrix products that keep the whole (length, length) table. A kernel that
    cannot do what the model asks (type, head size, mask) is an error, never a silent substitute.

    Not for models that write attention out as matmul and softmax, nor for ``nn.MultiheadAttention`` with
    ``need_weights=True``: neither calls the function. Little for short sequences, where attention is a small part.
    """

    backend: str = "flash"

    card: ClassVar[Card] = Card(
        name="sdpa",
        summary="attention by one named kernel (flash, efficient, math, cudnn)",
        place=Place.PROCESS,
        numerics=Numerics.CLOSE,
        relieves=(Bottleneck.COMPUTE_MEMORY_BOUND, Bottleneck.MEMORY_CAPACITY),
        requires=("a model that calls F.scaled_dot_product_attention",),
        cost="none for flash, efficient and cudnn; math keeps a (length, length) table for each head",
    )

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise PerftrainError(f"sdpa.backend is one of {', '.join(BACKENDS)}; it was {self.backend!r}. Try opt.sdpa.backend=flash.")

    def unavailable(self, plan: Plan) -> str:
        if plan.device.type == "cpu" and self.backend not in ON_CPU:
            return f"a CPU has {' and '.join(ON_CPU)}, not {self.backend}; use opt.sdpa.backend=flash or math."
        if plan.device.type == "cuda" and self.backend == "flash" and not torch.backends.cuda.is_flash_attention_available():
            return "this build of torch has no flash attention; use opt.sdpa.backend=efficient."
        if plan.device.type == "cuda" and self.backend == "cudnn" and not torch.backends.cudnn.is_available():
            return "this build of torch has no cuDNN; use opt.sdpa.backend=flash."
        return ""

    def describe(self, plan: Plan) -> str:
        return f"only the {self.backend} kernel may compute scaled_dot_product_attention"

    def unfit(self, workload: Mapping[str, Any]) -> str:
        return "the model never calls scaled_dot_product_attention" if workload.get("attention_layers") == 0 else ""

    def predict(self, now: StepBreakdown) -> Gain:
        share = now.share("forward", "backward")
        return Gain.from_share(share, 1.0, 1.5, f"forward and backward are {share:.0%} of the step; attention is a part of that")

    def process(self) -> AbstractContextManager[Any]:
        return sdpa_kernel([BACKENDS[self.backend]])

    def model(self, model: nn.Module, plan: Plan) -> nn.Module:
        if attention_layers(model) == 0:
            raise PerftrainError(
                f"sdpa chooses the kernel behind F.scaled_dot_product_attention; {type(model).__name__} never calls it. "
                "Leave the switch out."
            )
        return model

    def step(self, functions: StepFunctions) -> StepFunctions:
        inner, model, backend = functions.forward, functions.model, self.backend
        checked = False

        def forward(batch: Batch) -> Losses:
            nonlocal checked
            try:
                if checked:
                    return inner(batch)
                losses = inner(batch) if _compiled(model) else watched(inner, batch)
            except RuntimeError as error:
                if "scaled_dot_product_attention" in str(error) or "No available kernel" in str(error):
                    raise PerftrainError(_cannot(backend, error)) from error
                raise
            checked = True
            return losses

        return replace(functions, forward=forward)


def _cannot(backend: str, error: RuntimeError) -> str:
    seen = str(error).splitlines()[0]
    return (
        f"The {backend} kernel cannot compute this model's attention on this device: {seen} "
        "Try another opt.sdpa.backend, or add amp: flash and cudnn want 16-bit types on CUDA."
    )


def watched(forward: Callable[[Batch], Losses], batch: Batch) -> Losses:
    """The first step: what the source promised must happen, or the switch acts on nothing."""
    with _Calls() as calls:
        losses = forward(batch)
    if not calls.count:
        raise PerftrainError(
            "sdpa chooses the kernel behind F.scaled_dot_product_attention; the first step did not call it once "
            "(nn.MultiheadAttention with need_weights=True computes attention itself). Leave the switch out."
        )
    return losses


class _Calls(TorchFunctionMode):
    """Counts calls of the function; what ``nn.MultiheadAttention`` calls inside is hidden behind its own function."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.count += func is scaled_dot_product_attention or (
            func is multi_head_attention_forward and not kwargs.get("need_weights", True)
        )
        return func(*args, **kwargs)


def _compiled(model: nn.Module) -> bool:
    """A mode around compiled code would compile it once more."""
    return any(getattr(m, "_compiled_call_impl", None) is not None or hasattr(m, "_orig_mod") for m in model.modules())
