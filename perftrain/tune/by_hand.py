"""Where in a script somebody would write a switch that cannot be put in from outside."""

from __future__ import annotations

import ast

from perftrain.facts import Card, Place
from perftrain.tune.edits import models_of, name_of


def place_in(source: str, card: Card) -> tuple[int, str] | None:
    """Number and text of the line to edit: where the loader, the optimizer or the backward pass is, by the place of the switch."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    calls = sorted((n for n in ast.walk(tree) if isinstance(n, ast.Call)), key=lambda n: n.lineno)
    for call in calls:
        if _is_it(call, card.place):
            return call.lineno, source.splitlines()[call.lineno - 1].strip()
    return None


def _is_it(call: ast.Call, place: Place) -> bool:
    name = name_of(call.func)
    if place <= Place.PREFETCH:
        return name.endswith("DataLoader")
    if place <= Place.OPTIMIZER:  # whatever changes the model must stand before the optimizer takes its parameters
        return name[:1].isupper() and bool(models_of(call))
    return name == "backward"
