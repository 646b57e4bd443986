"""What this machine can do at most, measured: floating-point operations by dtype, and bytes moved."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import torch

from perftrain.facts import PerftrainError
from perftrain.measure.memory import free_bytes

Peak = dict[str, float]
"""``{"amount": ..., "seconds": ...}``: FLOP or bytes, and the time they took."""

_SIZES = {"cpu": (256, 512, 1024, 2048, 4096), "cuda": (1024, 2048, 4096, 8192, 16384)}
_COPY_BYTES = {"cpu": 2**28, "cuda": 2**30}  # far more than the caches that one process gets hold of
_BLOCK_S = 2e-3  # long beside the clock's resolution and a synchronization
_NONSENSE_PER_S = 1e17  # 100 PFLOP/s, or 100 PB/s


def peaks(device: str = "cpu", budget_s: float = 2.0) -> dict[str, dict[str, Peak]]:
    """The machine's measured best, with the threads that torch has now; takes about ``budget_s`` seconds.

    ``matmul``: FLOP by dtype, best over sizes: ``float32`` (full precision), ``bfloat16``, ``float16``, and where they change a
    float32 product here: ``tf32``, ``float32_as_bf16`` (the fp32_precision settings, restored afterwards).
    ``copy``: bytes; ``memory`` (bytes read plus bytes written), and on CUDA ``host_to_device``, ``device_to_host`` (pinned).
    Raises PerftrainError on other devices than cpu and cuda, and where a rate cannot be true.
    """
    where = torch.device(device)
    if where.type not in _SIZES:
        raise PerftrainError(f"Peaks are measured on cpu and cuda. Seen: {device}. Choose one of these.")
    cases = {"float32": (torch.float32, "ieee"), "bfloat16": (torch.bfloat16, "ieee"), "float16": (torch.float16, "ieee")}
    backend: Any = torch.backends.mkldnn if where.type == "cpu" else torch.backends.cuda
    float32 = backend.matmul
    before = float32.fp32_precision
    try:
        for name, mode in (("tf32", "tf32"), ("float32_as_bf16", "bf16"))[: 2 if where.type == "cpu" else 1]:
            if _changes_products(float32, mode, where):
                cases[name] = (torch.float32, mode)
        slice_s = budget_s / (len(cases) + (1 if where.type == "cpu" else 3))
        matmul: dict[str, Peak] = {}
        for name, (dtype, mode) in cases.items():
            float32.fp32_precision = mode
            matmul[name] = _believable(f"matmul in {name}", _best_matmul(dtype, where, slice_s))
    finally:
        float32.fp32_precision = before
    copies = {name: _believable(f"copy {name}", peak) for name, peak in _copies(where, slice_s)}
    return {"matmul": matmul, "copy": copies}


def _believable(what: str, peak: Peak) -> Peak:
    amount, seconds = peak["amount"], peak["seconds"]
    if not (amount > 0 and seconds > 0 and amount / seconds <= _NONSENSE_PER_S):
        raise PerftrainError(
            f"A peak is above zero and below {_NONSENSE_PER_S:.0e} a second. Seen for {what}: {amount:g} in {seconds:g} s. "
            "The clock or the device's synchronization is broken: measure again, or report this machine."
        )
    return peak


def _changes_products(float32: Any, mode: str, where: torch.device) -> bool:
    """Whether an fp32_precision does anything on this machine: it is accepted, and other bits come out."""
    left, right = torch.randn(2, 256, 256, device=where)
    float32.fp32_precision = "ieee"
    exact = left @ right
    float32.fp32_precision = mode
    return not torch.equal(exact, left @ right)


def _best_matmul(dtype: torch.dtype, where: torch.device, budget_s: float) -> Peak:
    best: Peak = {}
    end = perf_counter() + budget_s
    for size in _SIZES[where.type]:
        flop = 2.0 * size**3
        if best and 3 * flop * best["seconds"] / best["amount"] > end - perf_counter():
            break  # the next size does not fit the budget
        try:
            left, right = torch.randn(2, size, size, device=where).to(dtype)
            out = torch.empty_like(left)
        except torch.OutOfMemoryError:
            break
        seconds = _fastest_s(lambda a=left, b=right, o=out: torch.mm(a, b, out=o), where, budget_s / len(_SIZES[where.type]))
        if not best or flop / seconds > best["amount"] / best["seconds"]:
            best = {"amount": flop, "seconds": seconds}
    return best


def _copies(where: torch.device, slice_s: float) -> Iterator[tuple[str, Peak]]:
    size_bytes = min(_COPY_BYTES[where.type], free_bytes(where) // 8)
    here, there = (torch.ones(size_bytes, dtype=torch.uint8, device=where) for _ in range(2))
    yield "memory", {"amount": 2.0 * size_bytes, "seconds": _fastest_s(lambda: there.copy_(here), where, slice_s)}
    if where.type == "cuda":
        size_bytes //= 4
        here, host = here[:size_bytes], torch.ones(size_bytes, dtype=torch.uint8).pin_memory()
        for name, to, source in (("host_to_device", here, host), ("device_to_host", host, here)):
            seconds = _fastest_s(lambda t=to, s=source: t.copy_(s, non_blocking=True), where, slice_s)
            yield name, {"amount": float(size_bytes), "seconds": seconds}


def _fastest_s(call: Callable[[], object], where: torch.device, budget_s: float) -> float:
    """Seconds of one call in the fastest block of calls; each block waits for the device."""

    def block_s(calls: int) -> float:
        began = perf_counter()
        for _ in range(calls):
            call()
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        return (perf_counter() - began) / calls

    end = perf_counter() + budget_s
    block_s(1)  # warm-up: libraries load, pages and kernels are prepared
    calls = math.ceil(_BLOCK_S / block_s(1))
    best = block_s(calls)
    while perf_counter() < end:
        best = min(best, block_s(calls))
    return best
