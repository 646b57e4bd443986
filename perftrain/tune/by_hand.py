"""Where in a script somebody would write a switch that cannot be put in from outside."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from perftrain.facts import Card, Place


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
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if place <= Place.PREFETCH:
        return name.endswith("DataLoader")
    if place <= Place.OPTIMIZER:  # whatever changes the model must stand before the optimizer takes its parameters
        return name[:1].isupper() and "parameters" in _attributes(call)
    return name == "backward"


def _attributes(call: ast.Call) -> set[str]:
    def inside() -> Iterator[str]:
        for argument in call.args:
            yield from (n.attr for n in ast.walk(argument) if isinstance(n, ast.Attribute))

    return set(inside())
