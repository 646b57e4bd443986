"""Checks of the values that a recipe is given, before anything is built from them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from perftrain.facts import PerftrainError


def check_whole(name: str, value: object, at_least: int, example: int) -> None:
    """Raise a :class:`PerftrainError` unless ``value`` is a whole number of ``at_least`` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise PerftrainError(f"recipe.{name} must be a whole number, {at_least} or more: seen {value!r}. Type recipe.{name}={example}.")


def check_positive(name: str, value: object, example: float) -> None:
    """Raise a :class:`PerftrainError` unless ``value`` is a finite number above zero."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise PerftrainError(f"recipe.{name} must be a number above 0: seen {value!r}. Type recipe.{name}={example}.")


def check_text(name: str, value: object, example: str) -> None:
    """Raise a :class:`PerftrainError` unless ``value`` is a text that is not empty."""
    if not isinstance(value, str) or not value:
        raise PerftrainError(f"recipe.{name} must be a text: seen {value!r}. Type recipe.{name}={example}.")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise a :class:`PerftrainError` unless ``value`` is one of ``choices``."""
    if value not in choices:
        listed = ", ".join(choices)
        raise PerftrainError(f"recipe.{name} must be one of {listed}: seen {value!r}. Type recipe.{name}={choices[0]}.")


def check_full_batch(batch_size: int, images: int) -> None:
    """Raise a :class:`PerftrainError` where an epoch would have no step, as incomplete batches are dropped."""
    if batch_size > images:
        raise PerftrainError(
            f"An epoch needs a full batch: seen {images} training images for recipe.batch_size={batch_size}. "
            f"Type recipe.batch_size={images} or less."
        )
