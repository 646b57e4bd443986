"""Looking into batches and gradients: padding, and work that nobody uses. Reads only; never changes a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from perftrain.measure.memory import free_bytes

DEEPEST = 4


def tensors(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Every tensor in a structure of tuples, lists, dicts and objects with fields."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < DEEPEST:
        inner: Iterable[Any] = ()
        if isinstance(value, Mapping):
            inner = list(value.values())
        elif isinstance(value, (list, tuple)) and len(value) < 100:
            inner = value
        elif hasattr(value, "__dataclass_fields__") or type(value).__name__ in ("BatchEncoding", "Data", "Batch", "PackedSequence"):
            inner = list(vars(value).values()) if hasattr(value, "__dict__") else ()
        for each in inner:
            yield from tensors(each, depth + 1)


def padding(args: Any, kwargs: Any) -> dict[str, Any]:
    """How much of the widest padded input is real: ``{"real_share", "longest_share", "rows", "width"}``, or empty.

    Integers (token ids) and frames (batch, time, features) count; a padded row ends in the same value again and again, and
    all rows in the same one. ``longest_share``: what would be left if every batch were as wide as its longest row.
    """
    found: list[dict[str, Any]] = []
    for tensor in tensors((args, kwargs)):
        if tensor.dim() in (2, 3) and tensor.numel() and tensor.shape[0] > 1 and tensor.shape[1] >= 16 and not tensor.is_sparse:
            whole = not tensor.is_floating_point() and tensor.dtype is not torch.bool
            if (whole and tensor.dim() == 2) or (tensor.is_floating_point() and tensor.dim() == 3):
                found.append(_tail(tensor.detach()))
    found = [f for f in found if f]
    return max(found, key=lambda f: f["rows"] * f["width"]) if found else {}


def _tail(tensor: torch.Tensor) -> dict[str, Any]:
    """Lengths of the rows without the tail of one repeated value."""
    if tensor.dim() == 3:
        same = (tensor == 0).all(-1)
    else:
        ends = tensor[:, -1]
        values, counts = ends.unique(return_counts=True)
        fill = values[counts.argmax()]
        same = tensor == fill
    rows, width = same.shape
    tail = same.flip(1).long().cumprod(1).sum(1)
    if (tail > 1).float().mean() < 0.3:
        left = same.long().cumprod(1).sum(1)  # padded on the left
        if (left > 1).float().mean() < 0.3:
            return {}
        tail = left
    lengths = width - tail
    return {
        "real_share": float(lengths.sum()) / (rows * width),
        "longest_share": float(lengths.max()) / width,
        "rows": rows,
        "width": width,
    }


def gradients(optimizers: Iterable[Any], roots: Iterable[Any], beside: Iterable[Any] = ()) -> dict[str, Any]:
    """Gradients that no optimizer uses, also of modules ``beside`` the roots, and dense gradients of embeddings that are almost
    all zero. ``unused_sum``, of the parameters themselves, tells later whether somebody updates them by hand."""
    roots = list(roots)
    owned = {id(p) for o in optimizers for g in o.param_groups for p in g["params"]}
    names = {}
    for root in roots:
        for name, parameter in root.named_parameters():
            names.setdefault(id(parameter), (name, parameter))
    whole = sum(p.numel() for _, p in names.values()) or 1
    around = {id(p): (f"{type(m).__name__}.{n}", p) for m in beside for n, p in m.named_parameters()}
    asked = [(i, n, p) for i, (n, p) in (around | names).items() if p.grad is not None]
    unused = [(n, p) for i, n, p in asked if i not in owned]
    found: dict[str, Any] = {
        "parameters": whole,
        "tensors": len(names),
        "unused_share": sum(p.numel() for _, p in unused) / max(1, sum(p.numel() for _, _, p in asked)),
        "unused": [n for n, _ in unused[:4]],
        "unused_sum": sum(float(p.detach().double().sum()) for _, p in unused),
    }
    tables = [m for r in roots for m in r.modules() if isinstance(m, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and not m.sparse]
    touched = []
    for table in {id(t): t for t in tables}.values():
        grad = table.weight.grad
        if grad is not None and not grad.is_sparse:
            touched.append((table.weight.numel(), float((grad != 0).any(1).float().mean())))
    if touched:
        found["embedding_share"] = sum(n for n, _ in touched) / whole
        found["embedding_touched"] = sum(n * t for n, t in touched) / sum(n for n, _ in touched)
    return found


def memory(optimizers: Iterable[Any], roots: Iterable[Any]) -> dict[str, int]:
    """Bytes of what lives from step to step (weights and buffers, gradients, the optimizer's state), and what is free."""

    def size(found: Iterable[torch.Tensor]) -> int:
        return sum({t.data_ptr(): t.numel() * t.element_size() for t in found if t.layout is torch.strided}.values())

    roots, optimizers = list(roots), list(optimizers)
    weights = [t for r in roots for t in (*r.parameters(), *r.buffers())]
    weights += [p for o in optimizers for g in o.param_groups for p in g["params"]]
    state = [v for o in optimizers for s in o.state.values() if isinstance(s, dict) for v in s.values() if isinstance(v, torch.Tensor)]
    return {
        "weights_bytes": size(weights),
        "gradients_bytes": size(p.grad for p in weights if p.grad is not None),
        "optimizer_bytes": size(state),
        **room(),
    }


def room() -> dict[str, int]:
    """``free_bytes``: what could still be allocated. On a device also ``fragmented_bytes``: reserved, in pieces that nobody uses.

    Source: ``torch.cuda.memory_stats`` (``inactive_split_bytes``).
    """
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return {"free_bytes": free_bytes("cpu")}
    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    fragmented = torch.cuda.memory_stats().get("inactive_split_bytes.all.current", 0)
    return {"free_bytes": free_bytes("cuda") + unused, "fragmented_bytes": fragmented}


def shortened(value: Any, width: int, longest: int) -> Any:
    """``value`` with every tensor of shape (rows, width, ...) cut to its first ``longest`` columns."""
    if isinstance(value, torch.Tensor):
        return value[:, :longest] if value.dim() >= 2 and value.shape[1] == width else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(shortened(v, width, longest) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(shortened(v, width, longest) for v in value)
    if isinstance(value, Mapping) and type(value) is dict:
        return {k: shortened(v, width, longest) for k, v in value.items()}
    return value


def longest_of(value: Any) -> tuple[int, int] | None:
    """(width, longest row) of a padded batch, or None."""
    found = padding((value,), {})
    return (found["width"], max(1, round(found["longest_share"] * found["width"]))) if found else None
