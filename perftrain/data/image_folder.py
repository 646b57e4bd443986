"""Reaching the folder of image files below a dataset, to change how it reads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch.utils.data import Subset

from perftrain.data.keyed import Keyed
from perftrain.facts import PerftrainError

ATTRIBUTES = ("samples", "loader", "transform")


def image_folder(dataset: Any) -> Any:
    """The dataset with torchvision's ImageFolder attributes, itself or below ``Subset``; None where there is none."""
    dataset = _below(dataset)
    return dataset if all(hasattr(dataset, name) for name in ATTRIBUTES) else None


def _below(dataset: Any) -> Any:
    while isinstance(dataset, (Subset, Keyed)):
        dataset = dataset.dataset
    return dataset


def require_folder(dataset: Any, switch: str) -> Any:
    """The folder below ``dataset``, or an error that says what the switch needs."""
    folder = image_folder(dataset)
    if folder is None:
        raise PerftrainError(
            f"{switch} acts on a dataset of image files with the attributes {', '.join(ATTRIBUTES)} (torchvision's ImageFolder, "
            f"perftrain's JpegFolder, or a Subset of one); this one is a {type(_below(dataset)).__name__}. Leave +opt={switch} out."
        )
    return folder


def with_folder(dataset: Any, switch: str, change: Callable[[Any], None]) -> Any:
    """A copy of ``dataset`` whose folder ``change`` has set attributes of; the one that was given stays as it is."""
    require_folder(dataset, switch)
    changed = copy.copy(dataset)
    if isinstance(dataset, (Subset, Keyed)):
        changed.dataset = with_folder(dataset.dataset, switch, change)
    else:
        change(changed)
    return changed


def set_transform(folder: Any, transform: Any) -> None:
    folder.transform = transform
    if hasattr(folder, "transforms"):  # torchvision keeps it twice, for its repr
        folder.transforms = copy.copy(folder.transforms)
        if hasattr(folder.transforms, "transform"):
            folder.transforms.transform = transform


def set_paths(folder: Any, path_of: Callable[[str], str]) -> None:
    """Point every sample at ``path_of`` its path."""
    samples = [(path_of(path), *rest) for path, *rest in folder.samples]
    folder.samples = type(folder.samples)(samples)
    if hasattr(folder, "imgs"):  # torchvision's other name for the samples
        folder.imgs = folder.samples


def samples_in_order(dataset: Any) -> list[tuple[str, Any]]:
    """(path, label) of each index of ``dataset``."""
    if isinstance(dataset, Subset):
        inner = samples_in_order(dataset.dataset)
        return [inner[index] for index in dataset.indices]
    if isinstance(dataset, Keyed):
        return samples_in_order(dataset.dataset)
    change = getattr(dataset, "target_transform", None) or (lambda label: label)
    return [(path, change(label)) for path, label in dataset.samples]
