"""FLOP from a trace's shapes against torch's own counter."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from perftrain.attach.work import flop, moved_bytes


def traced(step):
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        step()
    return list(profiler.profiler.kineto_results.events())


def convolutions() -> torch.Tensor:
    layers = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(4, 4, 3, dilation=2))
    return layers(torch.randn(4, 3, 32, 32)).sum() + nn.Conv1d(3, 8, 5)(torch.randn(2, 3, 20)).sum()


def products() -> torch.Tensor:
    a, b = torch.randn(5, 7, 3, requires_grad=True), torch.randn(5, 3, 4, requires_grad=True)
    return nn.Sequential(nn.Linear(9, 17), nn.ReLU(), nn.Linear(17, 2))(torch.randn(11, 9)).sum() + torch.bmm(a, b).sum()


@pytest.mark.parametrize("loss", [products, convolutions])
def test_flop_are_those_of_torchs_counter(loss):
    torch.manual_seed(0)
    with FlopCounterMode(display=False) as counter:
        loss().backward()
    assert sum(flop(e) for e in traced(lambda: loss().backward())) == counter.get_total_flops()


def test_groups_share_the_work():
    """torch's counter takes the weight's gradient of a grouped convolution for a whole one."""
    layer, x = nn.Conv2d(4, 4, 3, groups=2), torch.randn(2, 4, 8, 8, requires_grad=True)
    forward = 2 * (4 * 2 * 3 * 3) * 2 * 6 * 6
    assert sum(flop(e) for e in traced(lambda: layer(x).sum().backward())) == 3 * forward


def test_attention_counts_like_its_two_products():
    q, k, v = (torch.randn(2, 4, length, 8) for length in (16, 24, 24))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(q, k, v)
    assert sum(flop(e) for e in traced(lambda: F.scaled_dot_product_attention(q, k, v))) == counter.get_total_flops() > 0


def test_a_recurrent_layer_counts_its_gates():
    layer, x = nn.LSTM(16, 32), torch.randn(7, 2, 16)
    forward = 2 * 7 * 2 * (4 * 32 * 16 + 4 * 32 * 32)
    assert sum(flop(e) for e in traced(lambda: layer(x)[0].sum().backward())) == 3 * forward


def test_views_move_nothing_and_sums_read_their_input():
    x = torch.randn(1000, 10)
    moved = {}
    for e in traced(lambda: (x.t().unsqueeze(0), x + x)):
        moved[e.name()] = moved.get(e.name(), 0) + moved_bytes(e)
    assert moved["aten::t"] == moved["aten::unsqueeze"] == 0
    assert moved["aten::add"] == 3 * 4 * 10_000
