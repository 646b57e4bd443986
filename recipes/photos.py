"""Classify photographs with a ResNet-18, as most people write it first: the default recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.models import resnet18

from perftrain.data.images import ON_ERROR, ImageFiles, JpegFolder, changed_ns, train_and_held_out
from perftrain.data.photographs import make_photographs, photographs_folder
from perftrain.facts import PerftrainError
from perftrain.opt.seams import Workload
from perftrain_recipes.checks import check_choice, check_full_batch, check_positive, check_text, check_whole
from perftrain_recipes.evaluation import classification

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's pixels, red, green, blue, on a scale of 0..1."""


@dataclass(frozen=True)
class PhotoData:
    """Where the images are."""

    root: str | None = None
    """A folder ``<root>/<class>/*.jpg``, or one with such folders as ``train/`` and ``val/``; None: photographs made once."""
    on_error: str = "stop"
    """A file that cannot be read: ``stop`` names it and ends the run, ``skip`` leaves it out and counts it."""

    def __post_init__(self) -> None:
        if self.root is not None:
            check_text("data.root", self.root, example="/path/to/images")
        check_choice("data.on_error", self.on_error, ON_ERROR)

    def folder(self) -> Path:
        return photographs_folder() if self.root is None else Path(self.root).expanduser().resolve()


@dataclass(frozen=True)
class Photos:
    """A ResNet-18 from scratch on files of 500 x 375 pixels: decode, crop at random, flip, normalize, one image at a time.

    Ten classes, one photograph each (see ``perftrain/data/photographs.py``). Held-out images are other crops of the same
    photographs, so accuracy says that training works, not how good a classifier it makes.
    """

    batch_size: int = 16
    side: int = 96
    """Pixels, height and width, of what the network sees."""
    lr: float = 0.01
    """Learning rate of SGD with momentum: reached after ``warmup_steps`` steps, then falling towards 0 at ``steps``."""
    warmup_steps: int = 10
    steps: int = 100
    """Optimizer steps of a recorded baseline run."""
    eval_images: int = 200
    """Held-out images that ``evaluate`` looks at, at most."""
    data: PhotoData = PhotoData()

    def __post_init__(self) -> None:
        whole = {"batch_size": (1, 16), "side": (32, 96), "warmup_steps": (1, 10), "steps": (1, 100), "eval_images": (1, 200)}
        for name, (at_least, example) in whole.items():
            check_whole(name, getattr(self, name), at_least, example)
        check_positive("lr", self.lr, example=0.01)
        if not isinstance(self.data, PhotoData):
            raise PerftrainError(f"recipe.data must be a PhotoData: seen {self.data!r}. Type recipe.data.root=/path/to/images.")

    def prepare(self) -> None:
        """Make the photographs, or check the folder that was given. Call it once, before anything is timed."""
        if self.data.root is None:
            make_photographs()
        self._files()

    def identity(self) -> dict[str, Any]:
        """What the data is: the made photographs' name and version, or the folder and when each class folder changed."""
        folder = self.data.folder()
        if self.data.root is None:
            return {"data": folder.name}
        return {"root": str(folder), "mtime_ns": dict(changed_ns(folder))}

    def build(self, seed: int) -> Workload:
        """Model, optimizer, loader, schedule; the global generator is seeded, and initialization, shuffling and (without
        workers) augmentation draw from it."""
        train_files, held_out_files = self._files()
        train = JpegFolder(train_files, train_transform(self.side), self.data.on_error)
        held_out = JpegFolder(held_out_files, eval_transform(self.side), self.data.on_error)
        torch.manual_seed(seed)
        model = resnet18(weights=None, num_classes=len(train.classes))
        optimizer = torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9)
        return Workload(
            model,
            optimizer,
            DataLoader(train, batch_size=self.batch_size, shuffle=True, drop_last=True),
            loss_fn=cross_entropy,
            evaluate=classification(held_out, at_most=self.eval_images),
            scheduler=LambdaLR(optimizer, self._schedule),
            counters=lambda: {"skipped_files": train.skipped + held_out.skipped},
        )

    def _schedule(self, step: int) -> float:
        """Part of ``lr``: up, then down in a straight line; a run that goes on beyond ``steps`` keeps a little."""
        return min((step + 1) / self.warmup_steps, max(1 - step / self.steps, 0.02))

    def _files(self) -> tuple[ImageFiles, ImageFiles]:
        folder = self.data.folder()
        if self.data.root is None and not folder.is_dir():
            raise PerftrainError(f"The photographs must be made first: there is no {folder}. Call prepare() before build().")
        train, held_out = train_and_held_out(folder)
        check_full_batch(self.batch_size, images=len(train.samples))
        return train, held_out


def train_transform(side: int) -> Callable[[Any], torch.Tensor]:
    """PIL image -> (3, side, side), float32."""
    crop, flip = transforms.RandomResizedCrop(side), transforms.RandomHorizontalFlip()
    return transforms.Compose([crop, flip, transforms.ToTensor(), transforms.Normalize(MEAN, STD)])


def eval_transform(side: int) -> Callable[[Any], torch.Tensor]:
    """The same without chance: the middle of the image."""
    smaller, middle = transforms.Resize(side * 8 // 7), transforms.CenterCrop(side)
    return transforms.Compose([smaller, middle, transforms.ToTensor(), transforms.Normalize(MEAN, STD)])


if __name__ == "__main__":
    from rich.progress import Progress

    from perftrain import Trainer

    recipe = Photos()
    recipe.prepare()
    work = recipe.build(seed=0)
    trainer = Trainer(work.model, work.loss_fn, work.optimizer, work.loader, evaluate=work.evaluate, scheduler=work.scheduler)
    with Progress(transient=True) as progress:
        task = progress.add_task("Training", total=recipe.steps)
        trainer.fit(steps=recipe.steps, on_step=lambda step: progress.update(task, completed=step + 1))
    print(trainer.record.breakdown)
    print(trainer.record.metrics)
