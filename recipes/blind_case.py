"""The story that people guess wrong: a device that looks busy, and a step that mostly waits for storage and decoding."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from perftrain.data.images import JpegFolder, train_and_held_out
from perftrain.data.photographs import make_photographs, photographs_folder
from perftrain.opt.seams import Workload
from perftrain_recipes.checks import check_full_batch, check_positive, check_whole
from perftrain_recipes.photos import train_transform


class Archive(Dataset[tuple[Any, int]]):
    """Photographs that come over a network: each file is waited for ``latency_s`` before it is read and decoded."""

    def __init__(self, images: JpegFolder, latency_s: float) -> None:
        self.images, self.latency_s = images, latency_s

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        time.sleep(self.latency_s)
        return self.images[index]


class StandInDevice(nn.Module):
    """A small classifier behind a device that is busy for ``busy_s`` a step and needs no CPU for it, as a GPU would be.

    No precision and no kernel makes the device faster: what a switch for computing promises here, it cannot keep.
    """

    def __init__(self, classes: int, busy_s: float) -> None:
        super().__init__()
        self.busy_s = busy_s
        self.body = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.LazyLinear(64), nn.ReLU(), nn.Linear(64, classes))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        time.sleep(self.busy_s)
        return self.body(x_BCHW)


@dataclass(frozen=True)
class BlindCase:
    """About half of each step waits for images (their latency and their decoding); the rest is a device that is busy.

    Whoever sees the busy device reaches for TF32 or AMP, and gains nothing. The cure is to load while the device computes.
    """

    batch_size: int = 16
    side: int = 96
    """Pixels, height and width, of what the network sees."""
    latency_ms: float = 3.0
    """Before each file."""
    busy_ms: float = 85.0
    """Of the device, in each step."""
    lr: float = 0.05
    steps: int = 60
    """Optimizer steps of a recorded baseline run."""

    def __post_init__(self) -> None:
        for name, (at_least, example) in {"batch_size": (1, 16), "side": (32, 96), "steps": (1, 60)}.items():
            check_whole(name, getattr(self, name), at_least, example)
        for name, example in {"latency_ms": 3.0, "busy_ms": 85.0, "lr": 0.05}.items():
            check_positive(name, getattr(self, name), example)

    def prepare(self) -> None:
        """Make the photographs once."""
        make_photographs()

    def identity(self) -> dict[str, Any]:
        return {"data": photographs_folder().name, "latency_ms": self.latency_ms, "busy_ms": self.busy_ms}

    def build(self, seed: int) -> Workload:
        files, _ = train_and_held_out(photographs_folder())
        check_full_batch(self.batch_size, images=len(files.samples))
        images = JpegFolder(files, train_transform(self.side))
        torch.manual_seed(seed)
        model = StandInDevice(len(images.classes), self.busy_ms / 1e3)
        model.body(torch.zeros(1, 3, self.side, self.side))  # gives the lazy layer its size
        return Workload(
            model,
            torch.optim.SGD(model.parameters(), lr=self.lr),
            DataLoader(Archive(images, self.latency_ms / 1e3), batch_size=self.batch_size, shuffle=True, drop_last=True),
            loss_fn=cross_entropy,
        )


if __name__ == "__main__":
    from perftrain import Trainer

    recipe = BlindCase()
    recipe.prepare()
    work = recipe.build(seed=0)
    trainer = Trainer(work.model, work.loss_fn, work.optimizer, work.loader)
    trainer.fit(steps=recipe.steps)
    print(trainer.record.breakdown)
