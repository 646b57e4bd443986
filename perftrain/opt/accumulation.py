"""The same batch in several smaller passes: less memory, the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from perftrain.facts import Bottleneck, Card, Gain, Numerics, PerftrainError, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import Batch, Losses, Plan, StepFunctions


class Part(NamedTuple):
    """A micro-batch, and its part (0..1) of the batch's samples."""

    batch: Batch
    weight: float


@dataclass(frozen=True)
class Accumulation(Switch):
    """Split each batch into ``micro_batches`` parts, with a forward and a backward pass each, and update once.

    Samples, their order and the number of updates stay as they were, so the result can be compared with the baseline's: this
    does not make batches larger (for that raise the recipe's batch size as well). Each part's losses count by its samples (in
    the unit of ``Workload.samples_in``), so gradients and the logged losses equal the batch's, also where parts are unequal.

    Pays where memory is short: activations shrink to one part's. It costs time: smaller products, more launches. Not for losses
    that are sums over samples or compare the samples of a batch with each other, and with care for batch normalization, whose
    statistics then come from the parts (the verdict notes it).
    """

    micro_batches: int = 2

    card: ClassVar[Card] = Card(
        name="accumulation",
        summary="split each batch into micro-batches, with one update: less memory, the same gradients",
        place=Place.STEP,
        numerics=Numerics.CLOSE,
        relieves=(Bottleneck.MEMORY_CAPACITY,),
        requires=("batches whose tensors all have the samples in their first dimension", "a loss that is a mean over samples"),
        conflicts=("optimizer_in_backward", "cuda_graph"),
        cost="time: smaller matrix products and more of them",
    )

    def __post_init__(self) -> None:
        if self.micro_batches < 2:
            raise PerftrainError(
                f"accumulation.micro_batches is 2 or more; it was {self.micro_batches}. Try opt.accumulation.micro_batches=2."
            )

    def unfit(self, workload: Mapping[str, Any]) -> str:
        size = workload.get("batch_size") or self.micro_batches
        return f"a batch has {size} samples, fewer than micro-batches ({self.micro_batches})" if size < self.micro_batches else ""

    def plan(self, plan: Plan) -> Plan:
        return replace(plan, micro_batches=self.micro_batches)

    def predict(self, now: StepBreakdown) -> Gain:
        return Gain(1.0, 1.0, "it saves memory, not time")

    def step(self, functions: StepFunctions) -> StepFunctions:
        def forward(part: Part) -> Losses:
            return {name: loss * part.weight for name, loss in functions.forward(part.batch).items()}

        def split(batch: Batch) -> Iterator[Part]:
            parts = list(split_batch(batch, self.micro_batches))
            counts = [functions.samples_in(part) for part in parts]
            total = sum(counts)
            return (Part(part, count / total) for part, count in zip(parts, counts, strict=True))

        return functions.with_(forward=forward, split=split)

    def report(self, model: nn.Module) -> Iterable[str]:
        if any(isinstance(module, _BatchNorm) for module in model.modules()):
            yield f"batch normalization sees 1/{self.micro_batches} of a batch at a time: the gradients are not quite the baseline's"


def split_batch(batch: Batch, count: int) -> Iterator[Batch]:
    """``count`` parts of a batch of any structure, along the first dimension of its tensors, equal to within a sample."""
    lengths: set[int] = set()
    walk(batch, lambda x: lengths.add(x.shape[0]) or x)
    if len(lengths) != 1:
        raise PerftrainError(
            "accumulation splits a batch along the first dimension of its tensors, which must be the samples in all of them; "
            f"their sizes are {sorted(lengths)}. Leave the switch out."
        )
    (samples,) = lengths
    if samples < count:
        raise PerftrainError(
            f"A batch has at least one sample for each micro-batch; one has {samples} for {count}. "
            f"Give the loader drop_last=True, or try opt.accumulation.micro_batches={max(2, samples)}."
        )
    ends = [samples * (i + 1) // count for i in range(count)]
    for begin, end in zip([0, *ends], ends, strict=False):
        yield walk(batch, lambda x, begin=begin, end=end: x[begin:end])


def walk(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with its tensors (but no scalars) changed."""
    if isinstance(value, Tensor):
        return change(value) if value.dim() else value
    if isinstance(value, Mapping):
        return type(value)({k: walk(v, change) for k, v in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(walk(v, change) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(walk(v, change) for v in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{name: walk(getattr(value, name), change) for name in value.__dataclass_fields__})
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise PerftrainError(
        f"accumulation splits tensors, in tuples, lists, dicts and dataclasses; the batch holds a {type(value).__name__}. "
        "Leave the switch out."
    )
