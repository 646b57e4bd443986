"""Useful FLOP are counted as the formula says; a utilization above one is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from perftrain.facts import PerftrainError
from perftrain.measure.flops import count_flop, model_flop_utilization


def test_a_linear_layer_forward_and_backward() -> None:
    """2 B I O forward; the same again for the weights' gradient, and for the inputs' where they need one."""
    layer, x = nn.Linear(16, 32), torch.randn(8, 16)
    assert count_flop(lambda: layer(x)) == 2 * 8 * 16 * 32
    assert count_flop(lambda: layer(x).sum().backward()) == 2 * (2 * 8 * 16 * 32)
    x.requires_grad_()
    assert count_flop(lambda: layer(x).sum().backward()) == 3 * (2 * 8 * 16 * 32)


def test_utilization_is_a_share_of_the_peak() -> None:
    assert model_flop_utilization(1e9, 0.01, {"amount": 4e11, "seconds": 1.0}) == pytest.approx(0.25)
    with pytest.raises(PerftrainError, match="faster than the machine"):
        model_flop_utilization(1e9, 0.001, {"amount": 4e11, "seconds": 1.0})
