"""The public face of the engine: give it what you have, it trains and tells where the time went."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from perftrain.data.image_folder import image_folder
from perftrain.data.lengths import padding_share
from perftrain.engine import checkpoint
from perftrain.engine.assemble import assemble
from perftrain.engine.loop import Run, train
from perftrain.engine.process import process_settings, require_environment
from perftrain.engine.telling import Telling, once_a_second
from perftrain.facts import PerftrainError, Progress, RunRecord, StepRow
from perftrain.loggers import Logger
from perftrain.measure.memory import peak_bytes, reset_peak
from perftrain.measure.meter import CHECK_EVERY, Meter, breakdown_of
from perftrain.opt.base import Switch
from perftrain.opt.seams import Batch, Losses, Workload, attention_layers, output_layer, repeated_blocks, takes


class Trainer:
    """A measured training loop.

    >>> trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, loader, opt=[opt.AMP()])
    >>> trainer.fit(steps=1000)
    >>> print(trainer.record.breakdown)

    Args:
        model, optimizer, loader: as you have them; switches rebuild what they must.
        loss_fn: ``loss_fn(model(inputs), targets)``, for batches that are an (inputs, targets) pair.
        opt: switches, in any order; they are applied in the order of their places.
        step: ``step(model, batch) -> loss`` or ``-> {"loss": ..., "other": ...}`` instead of ``loss_fn``: any batch, any
            number of losses. ``"loss"`` is differentiated, all are logged.
        evaluate: ``evaluate(model) -> {"accuracy": ...}``, called at the end of ``fit`` and every ``evaluate_every`` steps.
        scheduler: anything with ``step()``; called once an optimizer step.
        clip_norm: gradients are clipped to this norm.
        device: default: where the model's parameters are.
        stop_on_nan: stop within 64 steps (or ``log_every``) of a loss that is not finite.
        counters: read at the end of ``fit`` into the record's metrics (skipped files, ...).
        samples_in: how much work a batch is, in the unit of throughput; default: its first dimension.
        loggers: :class:`perftrain.TensorBoard`, :class:`perftrain.MLflow`, or what has their two methods
            (:class:`perftrain.loggers.Logger`): told of losses, seconds by phase, throughput and evaluations.
        log_every: steps that are averaged for each line of a log. Their time is the phase ``logging``.

    Raises:
        PerftrainError: conflicting switches, a switch that cannot run here, or a missing piece.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Tensor] | None,
        optimizer: torch.optim.Optimizer,
        loader: Iterable[Batch],
        *,
        opt: Sequence[Switch] = (),
        step: Callable[[nn.Module, Batch], Tensor | Losses] | None = None,
        evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None,
        scheduler: Any = None,
        clip_norm: float | None = None,
        device: torch.device | str | None = None,
        stop_on_nan: bool = True,
        counters: Callable[[], Mapping[str, float]] = dict,
        samples_in: Callable[[Batch], int] | None = None,
        loggers: Sequence[Logger] = (),
        log_every: int = CHECK_EVERY,
    ) -> None:
        if log_every < 1:
            raise PerftrainError(f"log_every is a number of steps, 1 or more; it was {log_every}. Try log_every={CHECK_EVERY}.")
        self.workload = Workload(model, optimizer, loader, loss_fn, step, evaluate, scheduler, clip_norm, counters, samples_in)
        self.switches = switches_only(opt)
        self.device = torch.device(device) if device is not None else device_of(model)
        self.stop_on_nan = stop_on_nan
        require_environment(self.switches)
        with process_settings(self.switches):
            self.run: Run = assemble(self.workload, self.switches, self.device)
        self.model = self.run.functions.model
        self.optimizer = self.run.functions.optimizer
        self.loggers = tuple(loggers) if self.rank == 0 else ()
        self.log_every = log_every if loggers else CHECK_EVERY
        self._trained = 0
        self.meter = Meter(self.device, stop_on_nan, self.run.ranks)
        self._record: RunRecord | None = None
        self._periodic: list[tuple[int, dict[str, float]]] = []

    @property
    def record(self) -> RunRecord:
        """What the last ``fit`` measured."""
        if self._record is None:
            raise PerftrainError("A record exists once something was trained; call fit(steps=...) first.")
        return self._record

    @property
    def loader(self) -> Iterable[Batch]:
        """The loader as the switches made it. Where it has ``state_dict``, it can go on in the middle of an epoch."""
        return self.run.loader

    @property
    def rank(self) -> int:
        """Which of the processes that train together this is; 0 prints and writes."""
        return self.run.ranks.rank

    @property
    def evaluations(self) -> list[tuple[int, dict[str, float]]]:
        """(step, metrics) of each evaluation during the last ``fit`` with ``evaluate_every``."""
        return list(self._periodic)

    @property
    def rows(self) -> list[StepRow]:
        """One row for each step of the last ``fit``."""
        return self.meter.rows()

    def fit(
        self,
        steps: int | None = None,
        *,
        epochs: int | None = None,
        evaluate_every: int | None = None,
        on_step: Callable[[int], None] | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> RunRecord:
        """Train and measure; calling it again goes on training and starts a new record.

        Args:
            steps: optimizer steps, or ``epochs`` for a loader that knows its length.
            evaluate_every: evaluate each so many steps too (its time is the phase ``evaluation``), not only at the end.
            on_step: called with the number of each finished step; its time belongs to ``rest``.
            on_progress: called at most once a second with how far it is (:func:`perftrain.live_view` draws it); on rank 0 only.

        Raises:
            NotFiniteLoss: the loss became NaN or infinite; ``record`` has what was measured until then.
        """
        steps = self._steps(steps, epochs)
        telling = Telling(self.loggers, self._trained)
        meter = self.meter = Meter(self.device, self.stop_on_nan, self.run.ranks, self.log_every, telling.look if self.loggers else None)
        tell = once_a_second(on_progress, meter, steps) if on_progress and self.rank == 0 else None
        self.run.after_step = self._after_step(evaluate_every, [call for call in (on_step, tell) if call], telling)
        started, begin = datetime.now(UTC), time.perf_counter()
        status, reason, metrics = "failed", "", {}
        reset_peak(self.device)
        try:
            with process_settings(self.switches):
                self.model.train()
                meter.start()
                train(self.run, steps, meter)
                meter.finish()
                metrics = self._evaluate()
                telling.look(meter)
                telling.evaluated(steps, metrics)
            status = "complete"
        except KeyboardInterrupt:
            status, reason = "interrupted", "stopped by the user"
            raise
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._record = self._make_record(status, reason, metrics, started, time.perf_counter() - begin)
            self._trained += len(meter)
            telling.close(meter, status)
        return self._record

    def save(self, path: str | Path) -> None:
        """Write model, optimizer and schedule to one file, which any number of ranks can go on from. All ranks call it.

        Not in it: the place in the data, the random generators, the scale of float16 losses.
        """
        checkpoint.save(path, checkpoint.state_of(self.model, self.optimizer, self.workload.scheduler), self.run.ranks)

    def load(self, path: str | Path) -> None:
        """Go on from what :meth:`save` wrote, here or with another number of ranks. All ranks call it."""
        checkpoint.load_state(checkpoint.load(path), self.model, self.optimizer, self.workload.scheduler)

    # --- pieces of fit ---
    def _steps(self, steps: int | None, epochs: int | None) -> int:
        if (steps is None) == (epochs is None):
            raise PerftrainError(f"fit takes either steps or epochs; steps={steps}, epochs={epochs}. Try fit(steps=1000).")
        if steps is None:
            if self.run.batches_per_epoch is None:
                raise PerftrainError("epochs needs a loader with a length; this one has none. Give fit(steps=...) instead.")
            steps = int(epochs or 0) * self.run.batches_per_epoch
        if steps < 1:
            raise PerftrainError(f"fit needs at least one step; it was asked for {steps}.")
        return steps

    def _after_step(
        self, evaluate_every: int | None, on_step: Sequence[Callable[[int], None]], telling: Telling
    ) -> tuple[tuple[str, Callable[[int], None]], ...]:
        calls: list[tuple[str, Callable[[int], None]]] = []
        if evaluate_every:
            if self.workload.evaluate is None:
                raise PerftrainError("evaluate_every needs evaluate=...; the Trainer was given none.")

            def evaluate(step: int) -> None:
                if (step + 1) % evaluate_every == 0:
                    self._periodic.append((step, self._evaluate()))
                    telling.evaluated(step + 1, self._periodic[-1][1])

            self._periodic = []
            calls.append(("evaluation", evaluate))
        return (*calls, *(("rest", call) for call in on_step))

    def _evaluate(self) -> dict[str, float]:
        if self.workload.evaluate is None:
            return {}
        averaged = self.run.functions.evaluated
        found = dict(self.workload.evaluate(self.model if averaged is None else averaged))
        self.model.train()
        return found

    def _make_record(self, status: str, reason: str, metrics: dict[str, float], started: datetime, seconds: float) -> RunRecord:
        try:
            rows = self.meter.rows()
        except PerftrainError:  # a NaN among the last losses; it is said once
            rows = self.meter.rows()
        steady = breakdown_of(rows)
        losses = {f"train_{name}": values[-1] for name, values in self.meter.losses().items() if values}
        return RunRecord(
            run_id=f"{started:%Y%m%d-%H%M%S-%f}",
            status=status,
            role="library",
            workload=facts_of(self.workload),
            fingerprint="",
            settings={s.card.name: dict(vars(s)) for s in self.switches},
            environment={"torch": torch.__version__, "threads": torch.get_num_threads(), "ranks": self.run.ranks.size},
            machine={"device": str(self.device)},
            started=started.isoformat(timespec="seconds"),
            breakdown=steady,
            warmup_s=sum(row.step_s for row in rows[: len(rows) - steady.steps]),
            peak_bytes=peak_bytes(self.device),
            metrics={**losses, **metrics, **self.workload.counters()},
            reason=reason,
            seconds=seconds,
        )


def facts_of(workload: Workload) -> dict[str, Any]:
    """What a program is made of, in the words that switches ask for (:meth:`perftrain.opt.base.Switch.unfit`)."""
    parameters = list(workload.model.parameters())
    linears = [m.weight.shape for m in workload.model.modules() if isinstance(m, nn.Linear)]
    return {
        "model": type(workload.model).__name__,
        "parameters": sum(p.numel() for p in parameters),
        "convolutions": sum(p.dim() == 4 for p in parameters),
        "optimizer": type(workload.optimizer).__name__,
        "optimizer_takes": [name for name in ("foreach", "fused") if takes(type(workload.optimizer), name)],
        "linears_by_16": sum(not (rows % 16 or columns % 16) for rows, columns in linears),
        "blocks": len(repeated_blocks(workload.model)),
        "attention_layers": attention_layers(workload.model),
        "vocabulary": getattr(output_layer(workload.model), "out_features", 0),
        "padding_share": padding_share(workload.loader),
        "image_files": image_folder(getattr(workload.loader, "dataset", None)) is not None,
        "clip_norm": workload.clip_norm,
        "batch_size": getattr(workload.loader, "batch_size", None),
        "workers": getattr(workload.loader, "num_workers", 0),
    }


def device_of(model: nn.Module) -> torch.device:
    """Where a model's parameters are (the CPU for a model without any)."""
    first = next(model.parameters(), None)
    return first.device if first is not None else torch.device("cpu")


def switches_only(opt: Any) -> tuple[Switch, ...]:
    """``opt`` as it is, if it holds made switches. Raises PerftrainError for names, classes and a switch without its list."""
    if not isinstance(opt, Switch):
        given = tuple(opt)
        if all(isinstance(switch, Switch) for switch in given):
            return given
    raise PerftrainError(f"opt takes a list of switches, each of them made: opt=[opt.AMP()]; seen: {opt!r}.")
