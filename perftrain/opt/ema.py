"""A running average of the weights beside them, for evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from perftrain.facts import Card, Gain, Numerics, PerftrainError, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import StepFunctions


@dataclass(frozen=True)
class EMA(Switch):
    """Keep an exponential moving average of the weights, and evaluate that instead of the last weights.

    No speed-up: it costs a pass over all weights every ``every`` steps and a copy of them. What it buys is a better model
    after the same steps, or the same model after fewer: averaged weights evaluate as if the learning rate had been lowered
    already. The training itself and its losses do not change by a bit. Buffers (statistics of batch normalization) are copied
    from the model, not averaged. Not for the first steps of a run (with ``decay`` 0.999 about the last thousand updates count),
    nor where memory is short. Source: torch.optim.swa_utils; Polyak and Juditsky 1992.
    """

    decay: float = 0.999
    every: int = 1
    """Steps between two updates of the average."""

    card: ClassVar[Card] = Card(
        name="ema",
        summary="evaluate a running average of the weights (a price in time, for quality after fewer steps)",
        place=Place.STEP,
        numerics=Numerics.EXACT,
        requires=("memory for a second copy of the weights",),
        cost="a copy of the weights, and a pass over them every few steps",
    )

    def __post_init__(self) -> None:
        if not 0 < self.decay < 1:
            raise PerftrainError(f"ema.decay lies between 0 and 1; it was {self.decay}. Try opt.ema.decay=0.999.")
        if self.every < 1:
            raise PerftrainError(f"ema.every is 1 or more; it was {self.every}. Try opt.ema.every=1.")

    def predict(self, now: StepBreakdown) -> Gain:
        return Gain(1.0, 1.0, "it costs time; what it buys is quality after fewer steps")

    def step(self, functions: StepFunctions) -> StepFunctions:
        model, zero_grad = functions.model, functions.zero_grad
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(self.decay))
        averaged.requires_grad_(False)
        done = 0

        def average() -> None:
            """After the update, whoever does that (loss scaling replaces it)."""
            nonlocal done
            zero_grad()
            done += 1
            if done % self.every == 0:
                averaged.update_parameters(model)

        return functions.with_(zero_grad=average, evaluated=averaged.module)
