"""Only algorithms that give the same bits every time: a switch with a price."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.utils import deterministic as memory

from perftrain.facts import Card, Gain, Numerics, Place, StepBreakdown
from perftrain.opt.base import Switch

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
REPEATABLE = (":4096:8", ":16:8")
"""The two values under which cuBLAS repeats itself."""


@dataclass(frozen=True)
class Deterministic(Switch):
    """``torch.use_deterministic_algorithms``, cuDNN deterministic and without trials, and on CUDA a cuBLAS workspace that repeats.

    It makes nothing faster: the verdict says what repeatable runs cost here. For debugging, and for comparing runs bit for bit.
    An operation without such an algorithm stops the run (``warn_only``: only warns). ``fill_memory`` also fills new tensors
    with a known value, which finds reads of uninitialized memory and costs a write of every tensor.
    Source: PyTorch documentation, "Reproducibility".
    """

    warn_only: bool = False
    fill_memory: bool = False

    card: ClassVar[Card] = Card(
        name="deterministic",
        summary="the same bits every run; costs speed, gains none",
        place=Place.PROCESS,
        numerics=Numerics.CLOSE,
        cost="slower operations, and some that refuse to run: the price of repeatable runs",
    )

    def predict(self, now: StepBreakdown) -> Gain:
        return Gain(1.0, 1.0, "it makes nothing faster; its price is what is measured")

    def environment(self) -> Mapping[str, str]:
        if not torch.cuda.is_available():
            return {}
        own = os.environ.get(CUBLAS, "")
        return {CUBLAS: own if own in REPEATABLE else REPEATABLE[0]}

    @contextmanager
    def process(self) -> Iterator[None]:  # type: ignore[override]
        cudnn = torch.backends.cudnn
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        cudnn_before = cudnn.deterministic, cudnn.benchmark
        fill_before = memory.fill_uninitialized_memory  # type: ignore[attr-defined]
        try:
            torch.use_deterministic_algorithms(True, warn_only=self.warn_only)
            cudnn.deterministic, cudnn.benchmark = True, False
            memory.fill_uninitialized_memory = self.fill_memory  # type: ignore[attr-defined]
            yield
        finally:
            memory.fill_uninitialized_memory = fill_before  # type: ignore[attr-defined]
            cudnn.deterministic, cudnn.benchmark = cudnn_before
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
