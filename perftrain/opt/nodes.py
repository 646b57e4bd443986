"""Batches made by threads of the program's own process: a pipeline of torchdata.nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import ClassVar

import torch
from torch.utils.data import IterableDataset

from perftrain.data.nodes import GATE, NodesLoader
from perftrain.facts import Bottleneck, Card, Gain, Numerics, PerftrainError, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import LoaderOptions, Plan


@dataclass(frozen=True)
class Nodes(Switch):
    """Each of ``threads`` threads reads, decodes and collates whole batches, ``ahead`` for each waiting ready; nothing is copied
    between processes.

    Pays where a sample's time is spent outside of Python (reading files, decoding images, numpy and torch), which lets threads run
    side by side, and where worker processes are dear. Not for transforms written in Python: one runs at a time, and takes turns
    with the training. Every sample once an epoch, in the DataLoader's order; resumes in the middle of one. With more than one
    thread random transforms draw in the order in which the threads come, so their numbers differ from run to run.
    Worker processes that the program's own loader has are not used. Source: torchdata documentation, torchdata.nodes.
    """

    threads: int = 2
    ahead: int = 2

    card: ClassVar[Card] = Card(
        name="nodes",
        summary="load batches in threads instead of processes (torchdata.nodes)",
        place=Place.LOADER_ENGINE,
        numerics=Numerics.CLOSE,
        relieves=(
            Bottleneck.INPUT_WORKERS, Bottleneck.INPUT_STORAGE, Bottleneck.INPUT_DECODE, Bottleneck.INPUT_COLLATE,
            Bottleneck.INPUT_WORKER_RESTART,
        ),
        requires=("torchdata", "a DataLoader on a dataset with an index"),
        conflicts=("workers", "persistent_workers", "prefetch", "in_order", "stateful_loader"),
        cost="memory of the batches in flight; Python in the dataset takes turns with the training",
    )  # fmt: skip

    def __post_init__(self) -> None:
        for name in ("threads", "ahead"):
            seen = getattr(self, name)
            if seen < 1:
                raise PerftrainError(f"nodes.{name} is 1 or more; it was {seen}. Try opt.nodes.{name}=2.")

    def unavailable(self, plan: Plan) -> str:
        return "" if find_spec("torchdata") else "it needs torchdata; try: pip install torchdata"

    def predict(self, now: StepBreakdown) -> Gain:
        share = now.share("data_wait")
        return Gain(1.0, 1 / (1 - min(share, 0.99)), f"the step waits for data {share:.0%} of its time; at best all of that vanishes")

    @contextmanager
    def process(self) -> Iterator[None]:  # type: ignore[override]
        threads = torch.get_num_threads()
        try:
            yield
        finally:
            GATE.close()  # off: nothing is made ahead while others have their turn
            torch.set_num_threads(threads)  # torchdata's threads leave 1 to threads that start later

    def loader(self, options: LoaderOptions) -> LoaderOptions:
        if isinstance(options.dataset, IterableDataset):
            raise PerftrainError(
                f"nodes shares the samples out by index; {type(options.dataset).__name__} is a stream, which one reader reads. "
                "Give the dataset __getitem__ and __len__, or leave the switch out."
            )
        engine = partial(NodesLoader, threads=self.threads, ahead=self.ahead)
        own = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "timeout": 0}
        return replace(options, engine=engine, **own)
