"""Accuracy and loss of a classifier on images it was not trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, Subset


def classification(held_out: Dataset[Any], at_most: int) -> Callable[[nn.Module], Mapping[str, float]]:
    """A function ``evaluate(model)`` that returns ``accuracy`` (0..1) and ``eval_loss`` (nats per sample).

    It looks at up to ``at_most`` samples of ``held_out``, taken from all over it, as files are sorted by class. The model
    is left in the mode it was in, and no global generator is drawn from: evaluating does not change the training.
    """
    total: int = len(held_out)  # type: ignore[arg-type]
    some = Subset(held_out, range(0, total, -(-total // at_most)))

    @torch.no_grad()
    def evaluate(model: nn.Module) -> Mapping[str, float]:
        training, device = model.training, next(model.parameters()).device
        model.eval()
        hits = loss = 0.0
        for inputs, targets in DataLoader(some, batch_size=50, generator=torch.Generator()):
            outputs, targets = model(inputs.to(device)).float(), targets.to(device)
            loss += cross_entropy(outputs, targets, reduction="sum").item()
            hits += (outputs.argmax(1) == targets).sum().item()
        model.train(training)
        return {"accuracy": hits / len(some), "eval_loss": loss / len(some)}

    return evaluate
