"""From plain PyTorch objects and switches to a :class:`Run`: walk the places in order, call the hooks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from perftrain.data.move import mover
from perftrain.engine.checks import check_switches
from perftrain.engine.fitting import step_fits
from perftrain.engine.loop import Run
from perftrain.engine.process import MortalWorker
from perftrain.engine.ranks import Ranks, join
from perftrain.facts import PerftrainError, Place
from perftrain.measure.meter import samples_in
from perftrain.opt.base import Switch
from perftrain.opt.seams import Batch, LoaderOptions, Losses, OptimizerOptions, Plan, StepFunctions, Workload, nothing

WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.")
"""What wrappers put into parameter names."""


def make_plan(switches: Sequence[Switch], device: torch.device) -> Plan:
    plan = Plan(device=device)
    for switch in switches:
        plan = switch.plan(plan)
    return plan


def assemble(workload: Workload, switches: Sequence[Switch], device: torch.device, dataset: Callable[[Any], Any] | None = None) -> Run:
    """Build the run. Call it inside :func:`perftrain.engine.process.process_settings` of the same switches.

    Args:
        dataset: wraps the dataset before any switch sees it (parity runs key its randomness).

    Raises:
        PerftrainError: conflicting switches, or a workload that lacks something.
    """
    ordered = sorted(switches, key=lambda s: s.card.place)
    plan = make_plan(ordered, device)
    check_switches(ordered, plan)
    ranks = join(plan)
    fits = None if plan.ranks else others_fit(workload, ordered, device, dataset)
    loader, after_copy = build_loader(workload.loader, ordered, dataset, device, fits)
    names = {id(p): name for name, p in workload.model.named_parameters()}
    model = workload.model.to(device)
    for switch in ordered:
        model = switch.model(model, plan)
    optimizer = build_optimizer(workload.optimizer, names, model, ordered)
    functions = plain_step(workload, model, optimizer, plan, ranks)
    for switch in ordered:
        functions = switch.step(functions)
    model.train()
    ranks.spread()
    return Run(
        loader=loader,
        batches=endless(loader),
        to_device=chained(mover(device), after_copy),
        functions=functions,
        in_flight=getattr(loader, "num_workers", 0) * (getattr(loader, "prefetch_factor", None) or 0),
        batches_per_epoch=length_of(loader),
        ranks=ranks,
    )


# --- loader ---
AfterCopy = tuple[Callable[[Batch], Batch], ...]


def build_loader(
    loader: Iterable[Batch],
    switches: Sequence[Switch],
    dataset: Callable[[Any], Any] | None = None,
    device: torch.device = torch.device("cpu"),  # noqa: B008, immutable
    fits: Callable[[Switch, int], bool] | None = None,
) -> tuple[Iterable[Batch], AfterCopy]:
    """The workload's loader with the switches' changes (the very same object where nothing changes it), and what is done to
    a batch on the device.

    ``dataset`` wraps what the switches made of the dataset, before anybody fetches from it.
    """
    if not isinstance(loader, DataLoader):
        return wrap_foreign(loader, switches, device)
    before = options = replace(LoaderOptions.of(loader), device=device, fits=fits)
    for number, switch in enumerate(switches):
        if dataset is not None and switch.card.place > Place.DATASET:
            options, dataset = replace(options, dataset=dataset(options.dataset)), None
        changed = switch.loader(options)
        if not isinstance(changed, LoaderOptions):
            found, more = wrap_foreign(changed, switches[number + 1 :], device)
            return found, (*options.after_copy, *more)
        options = changed
    if dataset is not None:
        options = replace(options, dataset=dataset(options.dataset))
    if options.num_workers == 0:
        check_no_workers_needed(before, options)
    if options.num_workers > 0:
        options = replace(options, worker_init_fn=MortalWorker(options.worker_init_fn))
    return loader if options == before else options.build(), options.after_copy


def check_no_workers_needed(before: LoaderOptions, options: LoaderOptions) -> None:
    """Refuse what acts on worker processes only, once every switch had its say."""
    asked = {
        "persistent_workers": options.persistent_workers,
        "prefetch": options.prefetch_factor is not None,
        "in_order": options.in_order is not before.in_order,
        "threads.per_worker": options.worker_init_fn is not before.worker_init_fn,
    }
    for name, wanted in asked.items():
        if wanted:
            switch = name.split(".")[0]
            raise PerftrainError(f"{name} needs worker processes; the loader has none. Add them: +opt=[workers,{switch}]")


def others_fit(
    workload: Workload, switches: Sequence[Switch], device: torch.device, dataset: Callable[[Any], Any] | None
) -> Callable[[Switch, int], bool]:
    """Tells a switch whether a batch size fits the device's memory together with all the other switches."""

    def fits(switch: Switch, batch_size: int) -> bool:
        others = [other for other in switches if other is not switch]
        return step_fits(workload, lambda trial: assemble(trial, others, device, dataset), batch_size, device)

    return fits


def wrap_foreign(loader: Iterable[Batch], switches: Sequence[Switch], device: torch.device) -> tuple[Iterable[Batch], AfterCopy]:
    """A loader that is no DataLoader can be wrapped, but none of its options changed."""
    options = bare = LoaderOptions(dataset=None, device=device)
    for switch in switches:
        changed = switch.loader(bare)
        if not isinstance(changed, LoaderOptions) or replace(changed, wrap=(), after_copy=()) != bare:
            raise PerftrainError(
                f"The switch {switch.card.name!r} changes the arguments of a torch.utils.data.DataLoader; "
                f"this workload's loader is a {type(loader).__name__}. Give a DataLoader, or leave the switch out."
            )
        options = replace(options, wrap=(*options.wrap, *changed.wrap), after_copy=(*options.after_copy, *changed.after_copy))
    for wrap in options.wrap:
        loader = wrap(loader)
    return loader, options.after_copy


def length_of(loader: Iterable[Batch]) -> int | None:
    """Batches of one epoch; None where the loader does not know (that of a stream has ``__len__`` and raises)."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None


def endless(loader: Iterable[Batch]) -> Iterator[Batch]:
    """Batches, epoch after epoch. A sampler with ``set_epoch`` is told the epoch. A loader that was resumed at the very end of an
    epoch has nothing to give in that one."""
    epoch = 0
    may_be_empty = hasattr(loader, "load_state_dict")
    while True:
        for part in (getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset")):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)  # type: ignore[union-attr]
        empty = True
        for batch in loader:
            empty = may_be_empty = False
            yield batch
        if empty and not may_be_empty:
            raise PerftrainError(
                "A loader must give at least one batch each time it is iterated; "
                + (
                    "it gave none. Is the dataset smaller than batch_size with drop_last=True?"
                    if epoch == 0
                    else f"it was exhausted after pass {epoch}. Give a DataLoader (or what starts anew when iterated), not a generator."
                )
            )
        may_be_empty = False
        epoch += 1


def chained(move: Callable[[Batch], Batch] | None, after_copy: AfterCopy) -> Callable[[Batch], Batch] | None:
    """``move``, then what is done on the device, as one function; None where there is nothing to do."""
    calls = ([move] if move else []) + list(after_copy)
    if len(calls) < 2:
        return calls[0] if calls else None

    def call_all(batch: Batch) -> Batch:
        for call in calls:
            batch = call(batch)
        return batch

    return call_all


# --- optimizer ---
def plain_name(name: str) -> str:
    """A parameter's name without what wrappers added."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def build_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], model: nn.Module, switches: Sequence[Switch]
) -> torch.optim.Optimizer:
    """The workload's own optimizer if no switch changed it or the parameters; else a new one on the final parameters."""
    groups = tuple({**group, "params": tuple(names.get(id(p), "") for p in group["params"])} for group in optimizer.param_groups)
    options = before = OptimizerOptions(cls=type(optimizer), groups=groups)
    for switch in switches:
        options = switch.optimizer(options)
    final = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    moved = any(
        name and final.get(name) is not p
        for g, o in zip(groups, optimizer.param_groups, strict=True)
        for name, p in zip(g["params"], o["params"], strict=True)
    )
    if options == before and not moved:
        return optimizer
    if any("" in group["params"] for group in groups):
        raise PerftrainError(
            "A switch replaces the optimizer, which holds parameters that are not the model's. "
            "Give a model that contains all the parameters that are trained."
        )
    rebuilt = [{**group, **options.arguments, "params": [final[name] for name in group["params"]]} for group in options.groups]
    takes = inspect.signature(options.cls).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in takes and options.cls is before.cls}
    return options.cls(rebuilt, **{**defaults, **options.arguments})


# --- step ---
def plain_step(workload: Workload, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, ranks: Ranks) -> StepFunctions:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    clip_norm, scheduler = workload.clip_norm, workload.scheduler
    if optimizer is not workload.optimizer:
        hand_over(scheduler, workload.optimizer, optimizer)
    return StepFunctions(
        forward=plain_forward(workload, model),
        backward=Tensor.backward,
        clip=nothing if clip_norm is None else lambda: _clip(parameters, clip_norm),
        optimizer_step=optimizer.step,
        zero_grad=optimizer.zero_grad,
        schedule=nothing if scheduler is None else scheduler.step,
        optimizer=optimizer,
        model=model,
        samples_in=of_all_ranks(workload.samples_in or samples_in, ranks),
        clip_norm=clip_norm,
        plan=plan,
    )


def of_all_ranks(samples_in: Callable[[Batch], int], ranks: Ranks) -> Callable[[Batch], int]:
    """Each rank has as many samples as this one; of what is not equal (tokens) it is an estimate that costs no exchange."""
    return samples_in if ranks.size == 1 else lambda batch: ranks.size * samples_in(batch)


def hand_over(scheduler: Any, before: torch.optim.Optimizer, optimizer: torch.optim.Optimizer) -> None:
    """Let ``scheduler``, and those that it chains, act on ``optimizer`` instead of the one that was rebuilt."""
    if getattr(scheduler, "optimizer", None) is before:
        scheduler.optimizer = optimizer
        mark_stepped(optimizer)
    for inner in getattr(scheduler, "_schedulers", ()):
        hand_over(inner, before, optimizer)


def mark_stepped(optimizer: Any) -> None:
    """Tell torch that schedule follows step: it looks for a mark that schedulers leave on the optimizer they were made for."""
    step = optimizer.step

    @wraps(step)
    def marked(*arguments: Any, **named: Any) -> Any:
        return step(*arguments, **named)

    marked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step, optimizer._opt_called = marked, True


def _clip(parameters: list[Tensor], clip_norm: float) -> None:
    nn.utils.clip_grad_norm_(parameters, clip_norm)


def plain_forward(workload: Workload, model: nn.Module) -> Callable[[Batch], Losses]:
    """The user's step function, or ``loss_fn(model(inputs), targets)``, always as losses by name."""
    step, loss_fn = workload.step, workload.loss_fn
    if step is not None:

        def call_step(batch: Batch) -> Losses:
            found = step(model, batch)
            if not isinstance(found, Mapping):
                return {"loss": found}
            if "loss" not in found:
                raise PerftrainError(
                    f"step(model, batch) returns a loss, or several by name with 'loss' among them; it had {', '.join(found)}."
                )
            return found

        return call_step
    if loss_fn is None:
        raise PerftrainError("A workload needs loss_fn(output, target) or step(model, batch); it has neither. Give one of them.")

    def call_loss(batch: Batch) -> Losses:
        inputs, targets = batch
        return {"loss": loss_fn(model(inputs), targets)}

    return call_loss
