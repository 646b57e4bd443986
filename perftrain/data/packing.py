"""Several short sequences in one row, instead of one row each and padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from perftrain.facts import PerftrainError

IGNORED = -100
"""The target that ``cross_entropy`` leaves out."""
LABELS = "labels"
"""The field that models which shift the targets themselves take them from."""


class Packed:
    """A ``collate_fn`` that joins a batch's samples into fewer, fuller rows and gives those to the collate_fn it wraps.

    A sample is a tuple or mapping of 1-D tensors of one length, the last of a tuple (or ``labels``) being the targets. The
    batch holds the same samples as before in the same structure. Picklable, so workers can have it.

    Args:
        collate_fn: pads rows to the longest and stacks them.
        row_length: positions of a row at most; None: as many as the longest sample of the batch. A longer sample has a row
            of its own, as it is.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any], row_length: int | None = None) -> None:
        self.collate_fn, self.row_length = collate_fn, row_length

    def __call__(self, samples: list[Any]) -> Any:
        lengths = [length_of(sample) for sample in samples]
        rows = first_fit(lengths, self.row_length or max(lengths))
        return self.collate_fn([joined([samples[number] for number in row]) for row in rows])


def length_of(sample: Any) -> int:
    """The one length of all parts of a sample.

    Raises:
        PerftrainError: anything but a pair (or more) of equally long 1-D tensors.
    """
    parts = list(sample.values()) if isinstance(sample, Mapping) else list(sample) if isinstance(sample, (tuple, list)) else []
    shapes = [tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__ for part in parts]
    if len(parts) < 2 or len(set(shapes)) != 1 or not isinstance(parts[0], Tensor) or parts[0].dim() != 1:
        raise PerftrainError(
            "packing joins samples that are a tuple or a dict of 1-D tensors of one length (tokens, and a target for each); "
            f"it saw {type(sample).__name__} with {shapes or 'no parts'}. Leave the switch out, or try +opt=length_buckets."
        )
    return int(parts[0].shape[0])


def first_fit(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Numbers of the sequences of each row: the longest first, each into the first row that has room for it."""
    rows: list[list[int]] = []
    room: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        at = next((row for row, free in enumerate(room) if free >= lengths[number]), len(rows))
        if at == len(rows):
            rows.append([])
            room.append(row_length)
        rows[at].append(number)
        room[at] -= lengths[number]
    return rows


def joined(samples: Sequence[Any]) -> Any:
    """One sample out of several, part by part.

    Targets that stand at their own input (``labels`` of models that shift them) are masked at each joint: there the last
    token of one text would have to predict the first of the next. Targets that are shifted already have no such place.
    """
    first = samples[0]
    keys = list(first) if isinstance(first, Mapping) else range(len(first))
    target = LABELS if isinstance(first, Mapping) else len(first) - 1
    parts = {key: [sample[key] for sample in samples] for key in keys}
    if target in parts:
        source = next(key for key in keys if key != target)
        parts[target] = [
            _without_first(own) if number and torch.equal(own, tokens) else own
            for number, (own, tokens) in enumerate(zip(parts[target], parts[source], strict=True))
        ]
    whole = {key: torch.cat(values) for key, values in parts.items()}
    if isinstance(first, Mapping):
        return whole
    return type(first)(*whole.values()) if hasattr(first, "_fields") else type(first)(whole.values())


def _without_first(targets: Tensor) -> Tensor:
    masked = targets.clone()
    masked[:1] = IGNORED
    return masked
