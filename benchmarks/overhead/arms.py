"""The arms: the same training in each library's own words. Each function trains one pass over ``task.loader``.

*Lean*: everything optional is off (no logging, checkpoints, progress bar; the library's barest mode where it has one).
*As it comes*: the way its quick start shows, with its defaults; nothing is logged by hand.
All are kept on the CPU. Libraries are imported inside, so a process loads only the one it measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from workloads import Task


@dataclass(frozen=True)
class Arm:
    name: str
    library: str
    """As the table shows it."""
    variant: str
    package: str
    """Module that must be importable; empty for the raw loop."""
    distribution: str
    """Name under which the installed version is looked up."""
    train: Callable[[Task], None]
    dict_batches: bool = False


def raw_steps(task: Task, batches: Iterable[Any]) -> None:
    """The hand-written loop that everything is measured against."""
    model, optimizer, loss_fn = task.model, task.optimizer, task.loss_fn
    for x, y in batches:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()


def raw(task: Task) -> None:
    raw_steps(task, task.loader)


def perftrain(task: Task) -> None:
    from perftrain import Trainer

    Trainer(task.model, task.loss_fn, task.optimizer, task.loader).fit(steps=task.steps)


def perftrain_meter(task: Task) -> None:
    """The raw loop with the three lines that add the meter to it."""
    from perftrain import Meter

    meter = Meter()
    meter.watch(task.model, task.optimizer)
    raw_steps(task, meter.steps(task.loader))


def lightning(task: Task, **options: Any) -> None:
    from lightning import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = task.model

        def training_step(self, batch: Any, _index: int) -> Tensor:
            x, y = batch
            return task.loss_fn(self.model(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return task.optimizer

    Trainer(accelerator="cpu", devices=1, max_epochs=1, **options).fit(Module(), task.loader)


def lightning_lean(task: Task) -> None:
    lightning(task, barebones=True)


def fabric(task: Task, loader_too: bool = True) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(task.model, task.optimizer)
    for x, y in fabric.setup_dataloaders(task.loader) if loader_too else task.loader:
        optimizer.zero_grad()
        loss = task.loss_fn(model(x), y)
        fabric.backward(loss)
        optimizer.step()


def fabric_lean(task: Task) -> None:
    fabric(task, loader_too=False)


def accelerate(task: Task, loader_too: bool = True) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(task.model, task.optimizer)
    for x, y in accelerator.prepare(task.loader) if loader_too else task.loader:
        optimizer.zero_grad()
        loss = task.loss_fn(model(x), y)
        accelerator.backward(loss)
        optimizer.step()


def accelerate_lean(task: Task) -> None:
    accelerate(task, loader_too=False)


def ignite(task: Task) -> None:
    from ignite.engine import create_supervised_trainer

    trainer = create_supervised_trainer(task.model, task.optimizer, task.loss_fn, device="cpu")
    trainer.run(task.loader, max_epochs=1)


def ignite_lean(task: Task) -> None:
    from ignite.engine import Engine

    def step(_engine: Engine, batch: Any) -> None:
        x, y = batch
        task.optimizer.zero_grad()
        task.loss_fn(task.model(x), y).backward()
        task.optimizer.step()

    Engine(step).run(task.loader, max_epochs=1)


class _WithLoss(nn.Module):
    """The Hugging Face Trainer wants the loss from the model."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.model, self.loss_fn = task.model, task.loss_fn

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.model(x)
        return {"loss": self.loss_fn(logits, labels), "logits": logits}


def huggingface(task: Task) -> None:
    """Defaults, but for a constant learning rate and batches in order: otherwise it would train something else."""
    from transformers import Trainer, TrainingArguments
    from transformers.optimization import get_constant_schedule

    arguments = TrainingArguments(
        "out", use_cpu=True, num_train_epochs=1, per_device_train_batch_size=1, train_sampling_strategy="sequential"
    )
    optimizers = (task.optimizer, get_constant_schedule(task.optimizer))
    # an item of the dataset is a batch already, so the collator takes the one item out of the list
    Trainer(
        _WithLoss(task), arguments, train_dataset=task.loader.dataset, data_collator=lambda items: items[0], optimizers=optimizers
    ).train()


def huggingface_lean(task: Task) -> None:
    from transformers import Trainer, TrainingArguments
    from transformers.optimization import get_constant_schedule

    class Lean(Trainer):
        def get_train_dataloader(self) -> Any:
            return task.loader

    arguments = TrainingArguments(
        "out",
        use_cpu=True,
        num_train_epochs=1,
        disable_tqdm=True,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        logging_nan_inf_filter=False,
        max_grad_norm=0.0,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        average_tokens_across_devices=False,
    )
    trainer = Lean(
        _WithLoss(task),
        arguments,
        train_dataset=task.loader.dataset,
        optimizers=(task.optimizer, get_constant_schedule(task.optimizer)),
    )
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback).__name__ in ("PrinterCallback", "ProgressCallback"):
            trainer.remove_callback(callback)
    trainer.train()


ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm("raw", "raw loop", "against itself", "", "torch", raw),
        Arm("perftrain", "perftrain Trainer", "as it comes, meter on", "perftrain", "perftrain", perftrain),
        Arm("perftrain-meter", "perftrain Meter", "on the raw loop", "perftrain", "perftrain", perftrain_meter),
        Arm("ignite-lean", "Ignite", "lean", "ignite", "pytorch-ignite", ignite_lean),
        Arm("ignite", "Ignite", "as it comes", "ignite", "pytorch-ignite", ignite),
        Arm("fabric-lean", "Fabric", "lean", "lightning", "lightning", fabric_lean),
        Arm("fabric", "Fabric", "as it comes", "lightning", "lightning", fabric),
        Arm("accelerate-lean", "Accelerate", "lean", "accelerate", "accelerate", accelerate_lean),
        Arm("accelerate", "Accelerate", "as it comes", "accelerate", "accelerate", accelerate),
        Arm("lightning-lean", "Lightning Trainer", "lean (barebones)", "lightning", "lightning", lightning_lean),
        Arm("lightning", "Lightning Trainer", "as it comes", "lightning", "lightning", lightning),
        Arm("huggingface-lean", "Hugging Face Trainer", "lean", "transformers", "transformers", huggingface_lean, True),
        Arm("huggingface", "Hugging Face Trainer", "as it comes", "transformers", "transformers", huggingface, True),
    )
}
