"""The next batch is copied to the GPU while this one trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from perftrain.data.move import mapped, mover
from perftrain.facts import Bottleneck, Card, Gain, Numerics, Place, StepBreakdown
from perftrain.opt.base import Switch
from perftrain.opt.seams import Batch, LoaderOptions, Plan


@dataclass(frozen=True)
class DevicePrefetch(Switch):
    """Copy one batch ahead on a stream of its own, so that the copy and the training of the batch before overlap.

    Copies overlap from page-locked memory only, so it also asks the DataLoader to pin; with another loader, pin there. Pays for
    batches of megabytes. Not for small ones, nor where the step waits for loading: no copy can start before its batch is there.
    CUDA only. Source: PyTorch CUDA notes, "CUDA streams".
    """

    card: ClassVar[Card] = Card(
        name="device_prefetch",
        summary="copy the next batch to the GPU while this one trains, on a stream of its own (CUDA)",
        place=Place.PREFETCH,
        numerics=Numerics.EXACT,
        relieves=(Bottleneck.INPUT_TRANSFER,),
        requires=("CUDA",),
        cost="one more batch in the GPU's memory, and page-locked memory for the batches in flight",
    )

    def unavailable(self, plan: Plan) -> str:
        return "" if plan.device.type == "cuda" else f"there is nothing to copy: batches are made and used on the {plan.device.type}."

    def predict(self, now: StepBreakdown) -> Gain:
        share = now.share("copy")
        return Gain(1.0, 1 / (1 - min(share, 0.99)), f"copying batches is {share:.0%} of the step; at best all of it overlaps")

    def loader(self, options: LoaderOptions) -> LoaderOptions:
        own = replace(options, pin_memory=True) if options.dataset is not None else options  # another loader has no such argument
        return replace(own, wrap=(*options.wrap, partial(prefetched, device=options.device)))


def prefetched(loader: Iterable[Batch], device: torch.device) -> OneAhead:
    """``loader`` with its batches on ``device``, each copied while the one before trains."""
    move = mover(device)
    assert move is not None, "unavailable() refuses the CPU"
    stream = torch.cuda.Stream(device)

    def start(batch: Batch) -> tuple[Batch, torch.cuda.Event]:
        with torch.cuda.stream(stream):
            copied = torch.cuda.Event()
            moved = move(batch)
            copied.record()
            return moved, copied

    def finish(started: tuple[Batch, torch.cuda.Event]) -> Batch:
        batch, copied = started
        training = torch.cuda.current_stream(device)
        training.wait_event(copied)  # this copy only: the next one is on the stream already
        mapped(batch, partial(keep_for, training))
        return batch

    return OneAhead(loader, start, finish)


def keep_for(stream: torch.cuda.Stream, value: Any) -> Any:
    """Memory that the copying stream allocated may be used again only once ``stream`` is done with it."""
    if isinstance(value, Tensor) and value.is_cuda:
        value.record_stream(stream)
    return value


class OneAhead:
    """A loader that has started with the next batch before it gives this one.

    Args:
        start: called with each batch as soon as the loader has it.
        finish: called with what ``start`` returned, when the batch is asked for.
    """

    def __init__(self, loader: Iterable[Batch], start: Callable[[Batch], Any], finish: Callable[[Any], Batch]) -> None:
        self.loader, self.start, self.finish = loader, start, finish
        self._state: Any = None

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not built yet (copy, pickle)
            raise AttributeError(name)
        found = getattr(self.loader, name)
        if name == "state_dict":
            return lambda: found() if self._state is None else self._state
        if name == "load_state_dict":
            self._state = None
        return found

    def __iter__(self) -> Iterator[Batch]:
        state_dict = getattr(self.loader, "state_dict", None)
        batches, end = iter(self.loader), object()
        following = self._started(batches, end)
        while following is not end:
            ready, state = following, state_dict() if state_dict else None
            following = self._started(batches, end)
            self._state = state  # from before reading ahead: a loader that resumes from it gives that batch again
            yield self.finish(ready)
        self._state = None

    def _started(self, batches: Iterator[Batch], end: object) -> Any:
        batch = next(batches, end)
        return batch if batch is end else self.start(batch)
