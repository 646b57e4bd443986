from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from perftrain.facts import PerftrainError

pytest.importorskip("sklearn")
from perftrain_recipes.digits import Digits


def losses(recipe: Digits, seed: int, steps: int) -> list[float]:
    work = recipe.build(seed)
    assert work.loss_fn is not None
    found: list[float] = []
    while len(found) < steps:
        for inputs, targets in work.loader:
            loss = work.loss_fn(work.model(inputs), targets)
            work.optimizer.zero_grad()
            loss.backward()
            work.optimizer.step()
            found.append(loss.item())
    assert work.evaluate is not None
    return [*found, work.evaluate(work.model)["accuracy"]]


def test_learns() -> None:
    recipe = Digits()
    recipe.prepare()
    assert losses(recipe, seed=0, steps=220)[-1] > 0.93


def test_a_seed_decides_everything() -> None:
    first = losses(Digits(), seed=1, steps=30)
    assert first == losses(Digits(), seed=1, steps=30)
    assert first != losses(Digits(), seed=2, steps=30)


def test_evaluation_leaves_generator_and_mode_alone() -> None:
    work = Digits().build(0)
    assert work.evaluate is not None
    before = torch.get_rng_state()
    assert set(work.evaluate(work.model)) == {"accuracy", "eval_loss"}
    assert torch.equal(torch.get_rng_state(), before)
    assert work.model.training


def test_yaml_names_every_field_with_its_default(recipe_yaml: Any) -> None:
    raw = recipe_yaml("digits")
    assert set(raw) - {"_target_"} == {field.name for field in fields(Digits)}
    assert instantiate(OmegaConf.create(raw)) == Digits()


@pytest.mark.parametrize(
    ("field", "value"),
    [("batch_size", "abc"), ("batch_size", 0), ("steps", 1.5), ("hidden", True), ("lr", float("nan")), ("lr", "x")],
)
def test_wrong_values_name_the_field_and_what_to_type(field: str, value: Any) -> None:
    with pytest.raises(PerftrainError, match=rf"recipe\.{field} must be .*seen {value!r}. Type recipe\.{field}="):
        Digits(**{field: value})


def test_a_batch_larger_than_the_data() -> None:
    with pytest.raises(PerftrainError, match="seen 1437 training images"):
        Digits(batch_size=2000).prepare()


def test_identity_is_stable() -> None:
    assert Digits().identity() == Digits(hidden=8).identity()
    assert Digits().identity()["images"] == 1797
