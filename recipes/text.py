"""Predict the next token of Python source with a small GPT: texts of very different lengths, padded to the longest of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from perftrain.data.texts import ON_ERROR, START, TextFiles, Texts, list_texts, load_texts, make_texts, texts_folder
from perftrain.facts import PerftrainError
from perftrain.opt.seams import Workload
from perftrain_recipes.checks import check_choice, check_positive, check_text, check_whole
from perftrain_recipes.gpt import GPT

IGNORED = -100
"""The target of a padded position: ``cross_entropy`` leaves it out."""


@dataclass(frozen=True)
class TextData:
    """Where the texts are."""

    root: str | None = None
    """A folder with *.py, *.txt or *.md files at any depth; None: the sources of Python's own library."""
    on_error: str = "stop"
    """A file that is no UTF-8 text: ``stop`` names it and ends the run, ``skip`` leaves it out and counts it."""

    def __post_init__(self) -> None:
        if self.root is not None:
            check_text("data.root", self.root, example="/path/to/texts")
        check_choice("data.on_error", self.on_error, ON_ERROR)

    def files(self) -> TextFiles:
        return list_texts(None if self.root is None else Path(self.root).expanduser().resolve())


@dataclass(frozen=True)
class Text:
    """A GPT of ``layers`` pre-norm blocks on functions and classes of 64 to 1024 characters (see ``perftrain/data/texts.py``).

    A tenth of the texts is held out. They come from the same files, so the bits per byte say that training works.
    """

    batch_size: int = 8
    vocabulary: int = 4096
    """Different ids: 256 bytes, one that begins a text, and the most frequent words."""
    width: int = 128
    heads: int = 4
    layers: int = 4
    tied: bool = True
    """The output layer's weight is the embedding."""
    lr: float = 1e-3
    """Learning rate of AdamW."""
    steps: int = 150
    """Optimizer steps of a recorded baseline run."""
    eval_texts: int = 64
    """Held-out texts that ``evaluate`` looks at, at most."""
    data: TextData = TextData()

    def __post_init__(self) -> None:
        whole = {"batch_size": (1, 8), "vocabulary": (START + 2, 4096), "width": (1, 128), "heads": (1, 4), "layers": (1, 4)}
        for name, (at_least, example) in (whole | {"steps": (1, 150), "eval_texts": (1, 64)}).items():
            check_whole(name, getattr(self, name), at_least, example)
        check_positive("lr", self.lr, example=0.001)
        if self.width % self.heads:
            raise PerftrainError(
                f"recipe.heads must divide recipe.width: seen heads {self.heads} for width {self.width}. Type recipe.heads=1."
            )
        if not isinstance(self.data, TextData):
            raise PerftrainError(f"recipe.data must be a TextData: seen {self.data!r}. Type recipe.data.root=/path/to/texts.")

    def prepare(self) -> None:
        """Cut and encode the texts. Call it once, before anything is timed."""
        make_texts(self.data.files(), self.vocabulary, self.data.on_error)
        self._texts()

    def identity(self) -> dict[str, Any]:
        """What the data is: its name holds a checksum of the files' names, sizes and times."""
        return {"data": texts_folder(self.data.files(), self.vocabulary).name}

    def build(self, seed: int) -> Workload:
        """Model, optimizer and loader; the global generator is seeded, and initialization and shuffling draw from it."""
        texts = self._texts()
        held_out = max(1, len(texts) // 10)  # the texts are sorted by checksum: any part is a fair sample
        train = Sequences(texts, range(held_out, len(texts)))
        torch.manual_seed(seed)
        model = GPT(self.vocabulary, self.width, self.heads, self.layers, longest=max(len(texts[n]) for n in range(len(texts))))
        if self.tied:
            model.head.weight = model.embedding.weight
        loader = DataLoader(train, self.batch_size, shuffle=True, drop_last=True, collate_fn=pad)
        return Workload(
            model,
            torch.optim.AdamW(model.parameters(), lr=self.lr),
            loader,
            loss_fn=next_token_loss,
            evaluate=bits_per_byte(Sequences(texts, range(min(held_out, self.eval_texts)))),
            clip_norm=1.0,
            counters=lambda: {"skipped_files": len(texts.unreadable)},
            samples_in=real_tokens,
        )

    def _texts(self) -> Texts:
        folder = texts_folder(self.data.files(), self.vocabulary)
        if not folder.is_dir():
            raise PerftrainError(f"The texts must be encoded first: there is no {folder}. Call prepare() before build().")
        texts = load_texts(folder)
        if (most := len(texts) - max(1, len(texts) // 10)) < self.batch_size:
            raise PerftrainError(f"An epoch needs a full batch: seen {most} texts to train on. Type recipe.batch_size={most} or less.")
        return texts


class Sequences(Dataset[tuple[Tensor, Tensor]]):
    """Texts as (inputs, targets), each (length,) int64: the target is the token that comes next."""

    def __init__(self, texts: Texts, numbers: Sequence[int]) -> None:
        self.texts, self.numbers = texts, numbers
        self.lengths = [len(texts[number]) for number in numbers]
        """Of every sample, without loading any."""

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        targets = torch.from_numpy(self.texts[self.numbers[index]]).long()
        return torch.cat([torch.tensor([START]), targets[:-1]]), targets


def pad(samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """(batch, longest) inputs and targets."""
    inputs, targets = zip(*samples, strict=True)
    return pad_sequence(inputs, batch_first=True), pad_sequence(targets, batch_first=True, padding_value=IGNORED)


def real_tokens(batch: tuple[Tensor, Tensor]) -> int:
    return int((batch[1] != IGNORED).sum())


def next_token_loss(logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:
    return cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten())


def bits_per_byte(held_out: Sequences) -> Callable[[nn.Module], Mapping[str, float]]:
    """A function ``evaluate(model)``: ``bits_per_byte`` of text, and ``eval_loss`` (nats per token)."""
    length_bytes = sum(held_out.texts.bytes_of(held_out.texts[number].tolist()) for number in held_out.numbers)

    @torch.no_grad()
    def evaluate(model: nn.Module) -> Mapping[str, float]:
        training, device = model.training, next(model.parameters()).device
        model.eval()
        nats = 0.0
        for batch in DataLoader(held_out, batch_size=16, collate_fn=pad, generator=torch.Generator()):
            nats += next_token_loss(model(batch[0].to(device)).float(), batch[1].to(device)).item() * real_tokens(batch)
        model.train(training)
        return {"bits_per_byte": nats / math.log(2) / length_bytes, "eval_loss": nats / sum(held_out.lengths)}

    return evaluate


if __name__ == "__main__":
    from rich.progress import Progress

    from perftrain import Trainer

    recipe = Text()
    recipe.prepare()
    work = recipe.build(seed=0)
    trainer = Trainer(work.model, work.loss_fn, work.optimizer, work.loader, evaluate=work.evaluate, clip_norm=work.clip_norm)
    with Progress(transient=True) as progress:
        task = progress.add_task("Training", total=recipe.steps)
        trainer.fit(steps=recipe.steps, on_step=lambda step: progress.update(task, completed=step + 1))
    print(trainer.record.breakdown)
    print(trainer.record.metrics)
