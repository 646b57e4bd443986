"""Output layer and cross-entropy in chunks: the table of logits never exists as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from perftrain.facts import Bottleneck, Card, Gain, Numerics, PerftrainError, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import Batch, Losses, Plan, StepFunctions, output_layer


@dataclass(frozen=True)
class ChunkedLoss(Switch):
    """Compute the output layer and its cross-entropy for ``chunk_tokens`` positions at a time.

    Pays with large vocabularies: logits, their softmax and their gradient are each (positions, vocabulary), often the
    largest tensors of the whole step. In training the output layer returns a stand-in for its logits, and
    ``cross_entropy(logits, targets)`` (the function or the module, after flatten, view, transpose or a shift by slicing) is
    computed from the hidden states; evaluation sees real logits. Float32 uses ``F.linear_cross_entropy`` where torch has it
    (2.14), which computes the gradients on the way; other types, and older versions, recompute each chunk's logits in backward.

    Not for models with few classes, and not where the loss uses the logits otherwise (accuracy in the step, z-loss,
    distillation, logits that are scaled or capped): refused in the first step, with what was seen. The model's compiled
    graph ends before the output layer (``fullgraph`` cannot be).
    """

    chunk_tokens: int = 512

    card: ClassVar[Card] = Card(
        name="chunked_loss",
        summary="output layer and cross-entropy in chunks, without the whole table of logits",
        place=Place.EDIT,
        numerics=Numerics.CLOSE,
        relieves=(Bottleneck.COMPUTE_MEMORY_BOUND, Bottleneck.MEMORY_CAPACITY),
        requires=("a model that ends in nn.Linear with more outputs than inputs", "a loss by cross_entropy"),
        cost="in 16-bit types: the output layer's forward once more in backward",
    )

    def __post_init__(self) -> None:
        tokens = self.chunk_tokens
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise PerftrainError(
                f"chunked_loss.chunk_tokens is a whole number above 0; it was {tokens!r}. Try opt.chunked_loss.chunk_tokens=512."
            )

    def unfit(self, workload: Mapping[str, Any]) -> str:
        return "the model does not end in a linear layer with more outputs than inputs" if workload.get("vocabulary") == 0 else ""

    def predict(self, now: StepBreakdown) -> Gain:
        share = now.share("forward", "backward")
        return Gain.from_share(share, 1.0, 1.5, f"forward and backward are {share:.0%} of the step; writing and reading logits is a part")

    def model(self, model: nn.Module, plan: Plan) -> nn.Module:
        head = output_layer(model)
        if head is None:
            raise PerftrainError(
                "chunked_loss needs a model that ends in nn.Linear with more outputs than inputs (a vocabulary); "
                f"{type(model).__name__} does not. Leave the switch out."
            )
        head.forward = Deferred(head, self.chunk_tokens)  # type: ignore[assignment]
        return model

    def step(self, functions: StepFunctions) -> StepFunctions:
        head = output_layer(functions.model)
        deferred = head.forward if head is not None else None
        assert isinstance(deferred, Deferred)
        inner, checked = functions.forward, False

        def forward(batch: Batch) -> Losses:
            nonlocal checked
            losses = inner(batch)
            if not checked and not deferred.calls:
                raise PerftrainError("chunked_loss replaces the output layer's call; the first step did not call it. Leave the switch out.")
            checked = True
            return losses

        return replace(functions, forward=forward)


class Deferred:
    """The output layer's ``forward`` in training: it only remembers what it would compute."""

    def __init__(self, head: nn.Linear, chunk_tokens: int) -> None:
        self.head, self.chunk_tokens = head, chunk_tokens
        self.calls = 0

    @torch.compiler.disable
    def __call__(self, hidden: Tensor) -> Any:
        if not (self.head.training and torch.is_grad_enabled()):
            return F.linear(hidden, self.head.weight, self.head.bias)
        self.calls += 1
        return Logits(hidden, self.head.weight, self.head.bias, self.chunk_tokens)


class NotUnderstood(PerftrainError, AttributeError):
    """The program does something else with its logits than a cross-entropy."""

    def __init__(self, what: str) -> None:
        super().__init__(
            "chunked_loss understands cross_entropy(logits, targets) with class indices, after flatten, view, reshape, transpose(1, 2), "
            f"float or slicing of positions; this program used {what}. Leave the switch out."
        )


@dataclass(frozen=True, eq=False)
class Logits:
    """Stands for ``linear(hidden, weight, bias)`` until a cross-entropy asks for it."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    chunk_tokens: int
    upcast: bool = False
    """The program asked for float32 logits."""
    second: bool = False
    """Classes are the second dimension, (batch, classes, length), not the last."""

    # --- what it looks like ---
    @property
    def shape(self) -> torch.Size:
        *rows, classes = (*self.hidden.shape[:-1], self.weight.shape[0])
        return torch.Size([rows[0], classes, *rows[1:]] if self.second else [*rows, classes])

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.hidden.dim()

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    # --- what may happen to it on the way ---
    def float(self) -> Logits:
        return replace(self, upcast=True)

    def contiguous(self) -> Logits:
        return self

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Logits:
        if self.second or end_dim % self.dim() == self.dim() - 1:
            raise NotUnderstood(f"flatten({start_dim}, {end_dim}) on logits of shape {tuple(self.shape)}")
        return replace(self, hidden=self.hidden.flatten(start_dim, end_dim))

    def reshape(self, *shape: Any) -> Logits:
        sizes = list(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        known = [size for size in sizes[:-1] if size != -1]
        whole = sizes[-1] == self.weight.shape[0] or (sizes[-1] == -1 and torch.Size(known).numel() == self.hidden.shape[:-1].numel())
        if self.second or not whole:
            raise NotUnderstood(f"view{tuple(sizes)} on logits of shape {tuple(self.shape)}")
        return replace(self, hidden=self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1]))

    view = reshape

    def transpose(self, first: int, second: int) -> Logits:
        if self.dim() != 3 or {first % 3, second % 3} != {1, 2}:
            raise NotUnderstood(f"transpose({first}, {second}) on logits of shape {tuple(self.shape)}")
        return replace(self, second=not self.second)

    def permute(self, *order: Any) -> Logits:
        if tuple(order[0] if len(order) == 1 else order) != (0, 2, 1):
            raise NotUnderstood(f"permute{order} on logits of shape {tuple(self.shape)}")
        return self.transpose(1, 2)

    def __getitem__(self, key: Any) -> Logits:
        keys = key if isinstance(key, tuple) else (key,)
        if Ellipsis in keys:
            at = keys.index(Ellipsis)
            keys = (*keys[:at], *[slice(None)] * (self.dim() - len(keys) + 1), *keys[at + 1 :])
        last = keys[self.dim() - 1] if len(keys) == self.dim() else slice(None)
        if self.second or last != slice(None) or not all(isinstance(k, slice) for k in keys):
            raise NotUnderstood(f"logits[{key}] on logits of shape {tuple(self.shape)}")
        return replace(self, hidden=self.hidden[keys[: self.dim() - 1]])

    # --- the loss ---
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        logits = args[0] if args else None
        name = getattr(func, "__name__", str(func))
        if isinstance(logits, Logits) and func is F.cross_entropy:
            return logits._cross_entropy(*args[1:], **kwargs)
        if isinstance(logits, Logits) and func in (torch.flatten, torch.reshape, torch.transpose, torch.permute):
            return getattr(logits, name)(*args[1:], **kwargs)
        raise NotUnderstood(name)

    def _cross_entropy(
        self,
        target: Any,
        weight: Tensor | None = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        if size_average is not None or reduce is not None or reduction not in ("mean", "sum"):
            raise NotUnderstood(f"cross_entropy with reduction={reduction!r}")
        rows = self.shape[:1] + self.shape[2:]
        if not isinstance(target, Tensor) or target.is_floating_point() or target.shape != rows or (self.dim() == 3 and not self.second):
            seen = f"{target.dtype} of shape {tuple(target.shape)}" if isinstance(target, Tensor) else type(target).__name__
            raise NotUnderstood(f"cross_entropy of logits {tuple(self.shape)} with targets {seen}")
        flat = replace(self, hidden=self.hidden.reshape(-1, self.hidden.shape[-1]))
        compute = fused if can_fuse(self.hidden, label_smoothing) else recomputed
        return compute(flat, target.reshape(-1), reduction, ignore_index=ignore_index, label_smoothing=label_smoothing, weight=weight)

    def __getattr__(self, name: str) -> NoReturn:
        raise NotUnderstood(f"logits.{name}")


def _refused(self: Logits, *others: Any) -> NoReturn:
    raise NotUnderstood("arithmetic on the logits")


for _name in ("add", "sub", "mul", "truediv", "matmul", "pow"):
    setattr(Logits, f"__{_name}__", _refused)
    setattr(Logits, f"__r{_name}__", _refused)


def can_fuse(hidden: Tensor, label_smoothing: float) -> bool:
    """torch's own function returns the loss in the type of the hidden states and computes gradients before they are scaled:
    right for float32 only, and not under autocast."""
    there = hasattr(F, "linear_cross_entropy") and hasattr(nn, "LinearCrossEntropyOptions")
    return there and label_smoothing == 0 and hidden.dtype == torch.float32 and not torch.is_autocast_enabled(hidden.device.type)


def fused(logits_NV: Logits, target_N: Tensor, reduction: str, **how: Any) -> Tensor:
    """Loss and gradients chunk by chunk in one go."""
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=logits_NV.chunk_tokens, chunking_method=None)  # type: ignore[attr-defined]
    return F.linear_cross_entropy(  # type: ignore[attr-defined]
        logits_NV.hidden, logits_NV.weight, target_N, linear_bias=logits_NV.bias, reduction=reduction, options=options, **how
    )


def recomputed(logits_NV: Logits, target_N: Tensor, reduction: str, ignore_index: int, label_smoothing: float, weight: Any) -> Tensor:
    """Each chunk's logits live while its loss is computed, and once more in backward."""
    how: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "weight": weight, "reduction": "sum"}

    def loss_of(hidden: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(hidden, logits_NV.weight, logits_NV.bias)
        return F.cross_entropy(logits.float() if logits_NV.upcast else logits, target, **how).float()

    chunks = zip(logits_NV.hidden.split(logits_NV.chunk_tokens), target_N.split(logits_NV.chunk_tokens), strict=True)
    sums: list[Any] = [checkpoint(loss_of, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    total = torch.stack(sums).sum()
    if reduction == "sum":
        return total
    counted = target_N != ignore_index
    return total / (counted.sum() if weight is None else (weight[target_N.clamp(min=0)] * counted).sum())
