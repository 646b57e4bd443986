"""Handwritten digits with a small network: steps so short that everything around the arithmetic shows."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from perftrain.opt.seams import Workload
from perftrain_recipes.checks import check_full_batch, check_positive, check_whole
from perftrain_recipes.evaluation import classification


@dataclass(frozen=True)
class Digits:
    """A multilayer perceptron on scikit-learn's digits: 1797 images of 8 x 8 pixels, a fifth of them held out.

    The whole data set stands in memory and a step takes about a millisecond, most of it spent around the arithmetic. About
    97 % of the held-out digits are told right after ``steps`` steps (27 epochs at the default batch size).
    """

    batch_size: int = 64
    hidden: int = 128
    """Width of the two hidden layers."""
    lr: float = 1e-3
    """Learning rate of Adam."""
    steps: int = 600
    """Optimizer steps of a recorded baseline run."""

    def __post_init__(self) -> None:
        check_whole("batch_size", self.batch_size, at_least=1, example=64)
        check_whole("hidden", self.hidden, at_least=1, example=128)
        check_positive("lr", self.lr, example=0.001)
        check_whole("steps", self.steps, at_least=1, example=600)

    def prepare(self) -> None:
        """Read the data once; nothing is made or downloaded, it comes with scikit-learn."""
        check_full_batch(self.batch_size, images=len(_digits().train_x))

    def identity(self) -> dict[str, Any]:
        """What the data is: name, size and checksum."""
        return {"data": "scikit-learn digits", "images": len(_digits().train_x) + len(_digits().test_x), "crc32": _digits().crc32}

    def build(self, seed: int) -> Workload:
        """Model, optimizer and loader; the global generator is seeded, and initialization and shuffling draw from it."""
        digits = _digits()
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Linear(64, self.hidden),
            nn.ReLU(),
            nn.Linear(self.hidden, self.hidden),
            nn.ReLU(),
            nn.Linear(self.hidden, 10),
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=self.lr)
        train, held_out = TensorDataset(digits.train_x, digits.train_y), TensorDataset(digits.test_x, digits.test_y)
        loader = DataLoader(train, batch_size=self.batch_size, shuffle=True, drop_last=True)
        evaluate = classification(held_out, at_most=len(held_out))
        return Workload(model, optimizer, loader, loss_fn=cross_entropy, evaluate=evaluate)


class _Data(NamedTuple):
    train_x: Tensor
    """(images, 64), float32, each pixel standardized over the training part."""
    train_y: Tensor
    """(images,), int64: the digit."""
    test_x: Tensor
    test_y: Tensor
    crc32: int


@cache
def _digits() -> _Data:
    x, y = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(x, y, test_size=0.2, random_state=0, stratify=y)
    scale = StandardScaler().fit(train_x)

    def pixels(part: Any) -> Tensor:
        return torch.from_numpy(np.asarray(scale.transform(part), dtype=np.float32))

    return _Data(
        pixels(train_x),
        torch.from_numpy(train_y),
        pixels(test_x),
        torch.from_numpy(test_y),
        zlib.crc32(x.tobytes() + y.tobytes()),
    )


if __name__ == "__main__":
    from perftrain import Trainer

    recipe = Digits()
    work = recipe.build(seed=0)
    trainer = Trainer(work.model, work.loss_fn, work.optimizer, work.loader, evaluate=work.evaluate)
    trainer.fit(steps=recipe.steps)
    print(trainer.record.breakdown)
    print(trainer.record.metrics)
