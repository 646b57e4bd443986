"""Large models on batches made up and kept on the device: what a switch does to computing, with no loader in the way.

Used as recipes: ``python -m perftrain --config-dir benchmarks/gpu/conf recipe=resnet50 +opt=amp`` with this folder on PYTHONPATH.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from perftrain import Workload

DISTINCT_BATCHES = 4


class Repeated:
    """An epoch of ``length`` batches, a few distinct ones over and over."""

    def __init__(self, batches: list[Any], length: int = 64) -> None:
        self.batches, self.length = batches, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return (self.batches[n % len(self.batches)] for n in range(self.length))


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Images:
    """A torchvision classifier on random images with labels that can be learned from the mean colour."""

    model: str = "resnet50"
    batch_size: int = 128
    side: int = 224
    steps: int = 60

    def build(self, seed: int) -> Workload:
        import torchvision.models

        torch.manual_seed(seed)
        model = getattr(torchvision.models, self.model)(weights=None, num_classes=10)
        generator = torch.Generator().manual_seed(seed)
        batches = []
        for _ in range(DISTINCT_BATCHES):
            labels = torch.randint(10, (self.batch_size,), generator=generator)
            images = torch.randn(self.batch_size, 3, self.side, self.side, generator=generator) + labels.view(-1, 1, 1, 1) / 5
            batches.append((images.to(device()), labels.to(device())))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        return Workload(model, optimizer, Repeated(batches), loss_fn=cross_entropy)  # type: ignore[arg-type]


@dataclass(frozen=True)
class GPT2:
    """GPT-2 small (124 M parameters) on random tokens, each of which is followed by its double (modulo the vocabulary)."""

    batch_size: int = 8
    length: int = 1024
    vocabulary: int = 50257
    width: int = 768
    heads: int = 12
    layers: int = 12
    steps: int = 60

    def build(self, seed: int) -> Workload:
        from perftrain_recipes.gpt import GPT

        torch.manual_seed(seed)
        model: Any = GPT(self.vocabulary, self.width, self.heads, self.layers, longest=self.length)
        model.head.weight = model.embedding.weight
        generator = torch.Generator().manual_seed(seed)
        batches = []
        for _ in range(DISTINCT_BATCHES):
            tokens = torch.randint(self.vocabulary, (self.batch_size, self.length), generator=generator)
            batches.append((tokens.to(device()), (2 * tokens % self.vocabulary).to(device())))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        return Workload(model, optimizer, Repeated(batches), loss_fn=token_loss, samples_in=lambda batch: batch[0].numel())  # type: ignore[arg-type]


def token_loss(logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:
    return cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten())
