"""What a switch is: a frozen dataclass with a card and six hooks that do nothing until overridden."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from perftrain.facts import Card, Gain, StepBreakdown
from perftrain.opt.seams import Batch, LoaderOptions, OptimizerOptions, Plan, StepFunctions


@dataclass(frozen=True)
class Switch:
    """One optimization, one variable. Subclass as a frozen dataclass with defaults, set ``card``, override few hooks.

    Hooks are called by the engine (or by what attaches to a foreign script) in the order of ``card.place``.
    """

    card: ClassVar[Card]

    # --- what it declares ---
    def unavailable(self, plan: Plan) -> str:
        """Why it cannot run here (one sentence), or an empty string."""
        return ""

    def plan(self, plan: Plan) -> Plan:
        """Numbers that other switches must know."""
        return plan

    def describe(self, plan: Plan) -> str:
        """What it sets on this device, in one line, where the name alone does not say it."""
        return ""

    def unfit(self, workload: Mapping[str, Any]) -> str:
        """Why it has nothing to act on in this program (facts of the model, loader, optimizer), or an empty string."""
        return ""

    def predict(self, now: StepBreakdown) -> Gain:
        """Expected speedup from the measured shares of a step."""
        return Gain(1.0, 1.0, "no prediction")

    def report(self, model: nn.Module) -> Iterable[str]:
        """What came of it, in lines for the verdict: asked after steps were trained, in a process that hosts no other arm."""
        return ()

    # --- the six hooks ---
    def environment(self) -> Mapping[str, str]:
        """Variables that must stand before torch starts. A switch that has any is measured in pairs of processes."""
        return {}

    def process(self) -> AbstractContextManager[Any]:
        """Process-wide settings: set on entry, restored on exit."""
        return nullcontext()

    def loader(self, options: LoaderOptions) -> LoaderOptions | Iterable[Batch]:
        """Changed options, or a loader to use instead."""
        return options

    def model(self, model: nn.Module, plan: Plan) -> nn.Module:
        """Change the model in place, or return what wraps it."""
        return model

    def optimizer(self, options: OptimizerOptions) -> OptimizerOptions:
        return options

    def step(self, functions: StepFunctions) -> StepFunctions:
        return functions
