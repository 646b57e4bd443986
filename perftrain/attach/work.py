"""What an operation computes and moves, told by its name and the shapes of its inputs: the two axes of a roofline.

Source: Williams, Waterman, Patterson, "Roofline" (2009). FLOP are counted as ``torch.utils.flop_counter`` does: products,
convolutions, attention, a multiply-add is two. That counter changes how a program dispatches; shapes in a trace do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

Shape = Sequence[int]
BYTES = {
    "float": 4, "double": 8, "int": 4, "long int": 8, "long": 8, "bool": 1, "unsigned char": 1, "signed char": 1, "short": 2,
    "c10::Half": 2, "c10::BFloat16": 2, "c10::complex<float>": 8, "c10::complex<double>": 16,
}  # fmt: skip
MOVES_NOTHING = (
    "aten::as_strided", "aten::empty", "aten::new_empty", "aten::resize", "aten::view", "aten::_unsafe_view", "aten::_reshape_alias",
    "aten::transpose", "aten::t", "aten::permute", "aten::expand", "aten::unsqueeze", "aten::squeeze", "aten::select", "aten::slice",
    "aten::narrow", "aten::split", "aten::chunk", "aten::unbind", "aten::unfold", "aten::detach", "aten::alias", "aten::set_",
    "aten::lift_fresh", "aten::resolve_", "aten::result_type", "aten::diagonal", "aten::cudnn_is_acceptable",
)  # fmt: skip
"""Beginnings of the names of operations that only look at their inputs in another way, or allocate."""


def flop(event: Any) -> float:
    """FLOP of one traced operation; 0 for all that is no product, convolution or attention."""
    count = COUNTERS.get(event.name())
    if count is None:
        return 0.0
    try:
        return float(count(event.shapes(), event))
    except (IndexError, TypeError, ValueError):  # shapes that the profiler did not get hold of
        return 0.0


def moved_bytes(event: Any) -> float:
    """Bytes that one traced operation reads and writes at least: its inputs, and a result as large as the largest of them."""
    if not event.name().startswith("aten::") or event.name().startswith(MOVES_NOTHING):
        return 0.0
    sizes = [prod(s) * BYTES.get(d, 0) for s, d in zip(event.shapes(), event.dtypes(), strict=False) if s]
    return float(sum(sizes) + max(sizes)) if sizes else 0.0


# --- counters ---
def _mm(shapes: Sequence[Shape], _: Any) -> float:
    (m, k), (_, n) = shapes[0], shapes[1]
    return 2 * m * k * n


def _addmm(shapes: Sequence[Shape], event: Any) -> float:
    return _mm(shapes[1:], event)


def _bmm(shapes: Sequence[Shape], _: Any) -> float:
    (b, m, k), (_, _, n) = shapes[0], shapes[1]
    return 2 * b * m * k * n


def _baddbmm(shapes: Sequence[Shape], event: Any) -> float:
    return _bmm(shapes[1:], event)


def _mv(shapes: Sequence[Shape], _: Any) -> float:
    return 2 * prod(shapes[0])


def _convolution(shapes: Sequence[Shape], event: Any) -> float:
    """Input (N, C, *space), weight (C_out, C / groups, *kernel); the other way round where it is transposed."""
    x, weight = shapes[0], shapes[1]
    stride, padding, dilation, transposed = event.concrete_inputs()[3:7]
    if transposed:
        return 2 * prod(weight) * x[0] * prod(x[2:])
    spread = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in zip(x[2:], weight[2:], stride, padding, dilation, strict=True)]
    return 2 * prod(weight) * x[0] * prod(spread)


def _convolution_backward(shapes: Sequence[Shape], event: Any) -> float:
    """As much again for each of the gradients that are asked for (input, weight)."""
    grad, x, weight = shapes[:3]
    given = event.concrete_inputs()
    transposed, wanted = given[7], given[10]
    return 2 * prod(weight) * grad[0] * prod((x if transposed else grad)[2:]) * sum(wanted[:2])


def _attention(shapes: Sequence[Shape], _: Any) -> float:
    """Query (B, H, L, D), key (B, H, S, D), value (B, H, S, E): scores, and the sum weighted by them."""
    (b, h, length, d), (_, _, s, _), (*_, e) = shapes[:3]
    return 2 * b * h * length * s * (d + e)


def _attention_backward(shapes: Sequence[Shape], event: Any) -> float:
    return 2.5 * _attention(shapes[1:], event)  # five products instead of two: the scores are computed once more


def _recurrent(shapes: Sequence[Shape], _: Any) -> float:
    """Input (T, B, I), weights (gates, I) and (gates, H)."""
    (t, b, _), into, hidden = shapes[:3]
    return 2 * t * b * (prod(into) + prod(hidden))


def _recurrent_backward(shapes: Sequence[Shape], event: Any) -> float:
    return 2 * _recurrent(shapes, event)


ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)  # fmt: skip
COUNTERS = {
    "aten::mm": _mm, "aten::addmm": _addmm, "aten::bmm": _bmm, "aten::baddbmm": _baddbmm, "aten::mv": _mv,
    "aten::convolution": _convolution, "aten::convolution_backward": _convolution_backward,
    "aten::mkldnn_rnn_layer": _recurrent, "aten::mkldnn_rnn_layer_backward": _recurrent_backward,
    **{f"aten::{name}": _attention for name in ATTENTION}, **{f"aten::{name}_backward": _attention_backward for name in ATTENTION},
}  # fmt: skip
