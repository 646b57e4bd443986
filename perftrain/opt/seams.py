"""The values that pass through a program's seams. Frozen: a switch returns a changed copy, it cannot reach sideways."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

Batch = Any
"""Whatever the loader yields: a tensor, tuple, dict, dataclass, nested."""
Losses = Mapping[str, Tensor]
"""Scalars by name; ``"loss"`` is the one that is differentiated."""


@dataclass(frozen=True)
class Plan:
    """Numbers that several switches share; each is written by one switch and read by others."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    compute_dtype: torch.dtype = torch.float32
    micro_batches: int = 1
    """Forward and backward passes before each update: exactly so many."""
    ranks: int | None = None
    """Processes that train together, each on its part of every batch; None: this one alone, without a process group."""


NO_ARGUMENTS = ("wrap", "after_copy", "engine", "device", "fits")
"""Fields of :class:`LoaderOptions` that no loader takes."""


@dataclass(frozen=True)
class LoaderOptions:
    """The arguments of ``torch.utils.data.DataLoader``, as they will be when it is built."""

    dataset: Any
    batch_size: int | None = 1
    shuffle: bool | None = None
    sampler: Any = None
    batch_sampler: Any = None
    num_workers: int = 0
    collate_fn: Callable[[list[Any]], Any] | None = None
    pin_memory: bool = False
    drop_last: bool = False
    timeout: float = 0
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: Any = None
    generator: torch.Generator | None = None
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    in_order: bool = True
    wrap: tuple[Callable[[Iterable[Batch]], Iterable[Batch]], ...] = ()
    """Applied to the finished loader, first to last."""
    after_copy: tuple[Callable[[Batch], Batch], ...] = ()
    """Applied to each batch once it is on the device (augmentation there), first to last."""
    engine: Callable[..., Iterable[Batch]] = DataLoader
    """What is built, with the arguments above; whatever it is has a length and starts anew when it is iterated."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where the model trains."""
    fits: Callable[[Any, int], bool] | None = None
    """``fits(switch, batch_size)``: do training steps of that size fit the device's memory, with all switches but this one? It
    tries. None where nobody can."""

    @staticmethod
    def of(loader: DataLoader[Any]) -> LoaderOptions:
        """Read the options back from a loader that somebody built."""
        taken = {f.name: getattr(loader, f.name) for f in fields(LoaderOptions) if hasattr(loader, f.name)}
        if loader.batch_sampler is not None and (type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None):
            taken.update(batch_size=1, sampler=None, drop_last=False)
        else:
            taken["batch_sampler"] = None
        if type(loader.sampler) is SequentialSampler or taken.get("batch_sampler") is not None:
            taken["sampler"] = None
        elif isinstance(loader.dataset, IterableDataset):
            taken["sampler"] = None  # torch's own stand-in
        elif (
            type(loader.sampler) is RandomSampler
            and not loader.sampler.replacement
            and loader.sampler._num_samples is None
            and loader.sampler.generator is loader.generator
        ):
            taken.update(sampler=None, shuffle=True)
        if loader.num_workers == 0:
            taken.update(prefetch_factor=None, persistent_workers=False)
        return LoaderOptions(**taken)

    def build(self) -> Iterable[Batch]:
        arguments = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in NO_ARGUMENTS}
        loader: Iterable[Batch] = self.engine(**arguments)
        for wrap in self.wrap:
            loader = wrap(loader)
        return loader


@dataclass(frozen=True)
class OptimizerOptions:
    """An optimizer's class and parameter groups, by parameter name, as they will be when it is built."""

    cls: type[torch.optim.Optimizer]
    groups: tuple[Mapping[str, Any], ...]
    """Each with ``"params"``: names of parameters in the model."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Constructor arguments on top of the groups' own (``fused=True``)."""


def takes(cls: type, argument: str) -> bool:
    """Whether an optimizer's constructor has this argument."""
    return argument in inspect.signature(cls).parameters


def nothing() -> None:
    """What a step function is where there is nothing to do; the loop leaves it out."""


@dataclass(frozen=True)
class StepFunctions:
    """What one step does, as callables decided before step 0. The loop calls them in this order."""

    forward: Callable[[Batch], Losses]
    """Model and loss of one micro-batch; what is returned stays on the device."""
    backward: Callable[[Tensor], None]
    clip: Callable[[], None]
    optimizer_step: Callable[[], None]
    zero_grad: Callable[[], None]
    schedule: Callable[[], None]
    optimizer: torch.optim.Optimizer
    model: nn.Module
    samples_in: Callable[[Batch], int]
    clip_norm: float | None = None
    """The norm that ``clip`` clips to; None where the program does not clip."""
    split: Callable[[Batch], Iterable[Batch]] | None = None
    """Makes micro-batches of a batch: each has a forward and a backward pass of its own, all have one update."""
    evaluated: nn.Module | None = None
    """What is evaluated where that is not the trained model (averaged weights)."""
    plan: Plan = field(default_factory=Plan)

    def with_(self, **changes: Any) -> StepFunctions:
        return replace(self, **changes)


@dataclass(frozen=True)
class Workload:
    """A training program before any switch: plain PyTorch objects. A recipe's ``build(seed)`` returns one."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: Iterable[Batch]
    loss_fn: Callable[[Any, Any], Tensor] | None = None
    """``loss_fn(model(inputs), targets)`` for batches that are a pair; otherwise give ``step``."""
    step: Callable[[nn.Module, Batch], Tensor | Losses] | None = None
    """``step(model, batch)`` returns the loss, or several by name of which ``"loss"`` is differentiated."""
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None
    scheduler: Any = None
    """Anything with ``step()``, called once an optimizer step."""
    clip_norm: float | None = None
    counters: Callable[[], Mapping[str, float]] = dict
    """What the data side counted (skipped files, ...), read at the end of a run."""
    samples_in: Callable[[Batch], int] | None = None
    """How much work a batch is, in the unit of throughput (tokens that are no padding); None: its first dimension."""


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that a deep model repeats (transformer layers, residual blocks), outermost first in the order of the model.

    The children of one class, within one ``ModuleList`` or ``Sequential`` or several of them, that hold the most parameters
    together and at least two of them; plain layers (without children of their own) do not count. Empty where nothing repeats.
    """
    found: dict[type[nn.Module], list[nn.Module]] = {}
    inside: set[int] = set()
    for module in model.modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        for child in module.children():
            if id(child) not in inside and not isinstance(child, (nn.ModuleList, nn.Sequential)) and any(True for _ in child.children()):
                found.setdefault(type(child), []).append(child)
                inside.update(id(m) for m in child.modules())
    several = [blocks for blocks in found.values() if len(blocks) > 1]
    return max(several, key=lambda blocks: sum(p.numel() for b in blocks for p in b.parameters()), default=[])


def output_layer(model: nn.Module) -> nn.Linear | None:
    """The linear layer that turns hidden states into the logits of a vocabulary: the last one outside the repeated blocks, if
    it has more outputs than inputs. None where the model ends otherwise."""
    inside = {id(m) for block in repeated_blocks(model) for m in block.modules()}
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and id(m) not in inside]
    last = layers[-1] if layers else None
    return last if type(last) is nn.Linear and last.out_features > last.in_features else None


def attention_layers(model: nn.Module) -> int | None:
    """Modules that call ``scaled_dot_product_attention``, as their source says; None where a source is missing and none is found."""
    calls = [_calls_attention(type(module)) for module in model.modules()]
    if getattr(getattr(model, "config", None), "_attn_implementation", None) == "sdpa":  # of the transformers library
        calls.append(True)
    found = sum(call is True for call in calls)
    return found if found or None not in calls else None


@cache
def _calls_attention(cls: type[nn.Module]) -> bool | None:
    if issubclass(cls, nn.MultiheadAttention):
        return True
    own = [c for c in cls.__mro__ if not c.__module__.startswith(("torch.", "builtins"))]
    try:
        return any("scaled_dot_product_attention" in inspect.getsource(c) for c in own)
    except (OSError, TypeError):  # typed into an interpreter
        return None
