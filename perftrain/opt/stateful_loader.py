"""A loader that can go on in the middle of an epoch: torchdata's StatefulDataLoader."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar

from torch.utils.data import IterableDataset

from perftrain.data.resume import Resumable, sampler_of
from perftrain.facts import Card, Gain, Numerics, PerftrainError, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import LoaderOptions, Plan


@dataclass(frozen=True)
class StatefulLoader(Switch):
    """``trainer.loader.state_dict()`` at any step; after ``load_state_dict`` the epoch goes on with the next batch, none twice, none lost.

    It makes nothing faster: the verdict says what resumable epochs cost here. Same batches in the same order as the DataLoader.
    What resumes is which samples come; random numbers drawn for their augmentation do not. A state is taken every ``every_steps``
    batches and the ones since are read again, so more than 1 is cheaper while training and dearer when resuming.
    For an ``IterableDataset`` the dataset itself must keep a state. Source: torchdata documentation.
    """

    every_steps: int = 1

    card: ClassVar[Card] = Card(
        name="stateful_loader",
        summary="epochs that resume in the middle (torchdata's StatefulDataLoader); costs speed, gains none",
        place=Place.LOADER_ENGINE,
        numerics=Numerics.EXACT,
        requires=("torchdata", "a DataLoader"),
        conflicts=("in_order",),
        cost="a state for each batch in flight: the price of resuming in the middle of an epoch",
    )

    def __post_init__(self) -> None:
        if self.every_steps < 1:
            raise PerftrainError(
                f"stateful_loader.every_steps is 1 or more; it was {self.every_steps}. Try opt.stateful_loader.every_steps=1."
            )

    def unavailable(self, plan: Plan) -> str:
        return "" if find_spec("torchdata") else "it needs torchdata; try: pip install torchdata"

    def predict(self, now: StepBreakdown) -> Gain:
        return Gain(1.0, 1.0, "it makes nothing faster; its price is what is measured")

    def loader(self, options: LoaderOptions) -> LoaderOptions:
        from torchdata.stateful_dataloader import StatefulDataLoader

        engine = partial(StatefulDataLoader, snapshot_every_n_steps=self.every_steps)
        return replace(options, engine=engine, **resumable(options))


def resumable(options: LoaderOptions) -> dict[str, Any]:
    """The loader's own sampler, made resumable: torchdata's would shuffle in another order."""
    if isinstance(options.dataset, IterableDataset):
        return {}
    if options.batch_sampler is not None:
        return {"batch_sampler": Resumable(options.batch_sampler, options.generator)}
    sampler = sampler_of(options.dataset, options.shuffle, options.sampler, options.generator)
    return {"sampler": Resumable(sampler, options.generator), "shuffle": None}
