from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn

from perftrain.facts import PerftrainError
from perftrain_recipes.text import IGNORED, Text, TextData, pad, real_tokens


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PERFTRAIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "texts").mkdir()
    for number in range(60):
        lines = "".join(f"    total = total + item_{line % 7}\n" for line in range(2 + number % 20))
        (tmp_path / "texts" / f"{number}.py").write_text(f"def function_{number}(total):\n    # adds up all of its items\n{lines}")
    return tmp_path / "texts"


def small(root: Path, **changes: Any) -> Text:
    settings = {"batch_size": 4, "vocabulary": 320, "width": 16, "heads": 2, "layers": 2, "data": TextData(str(root)), **changes}
    return Text(**settings)


def losses(recipe: Text, seed: int, steps: int = 12) -> list[float]:
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
    return found


def test_learns_and_a_seed_decides_everything(root: Path) -> None:
    recipe = small(root, lr=0.01)
    recipe.prepare()
    first = losses(recipe, 1, steps=52)
    assert len(first) == 52  # 54 texts, whole batches only: 13 steps an epoch
    assert first[-1] < 0.5 * first[0]
    assert first == losses(recipe, 1, steps=52)
    assert first[:12] != losses(recipe, 2)[:12]


def test_batches_are_padded_to_their_longest(root: Path) -> None:
    recipe = small(root)
    recipe.prepare()
    work = recipe.build(0)
    inputs, targets = next(iter(work.loader))
    assert inputs.shape == targets.shape
    assert inputs.dtype == targets.dtype == torch.int64
    assert (inputs[:, 0] == 256).all()
    assert work.samples_in is not None
    assert work.samples_in((inputs, targets)) == int((targets != IGNORED).sum()) < inputs.numel()
    for row, target in zip(inputs, targets, strict=True):
        length = int((target != IGNORED).sum())
        assert torch.equal(row[1:length], target[: length - 1])
        assert (target[length:] == IGNORED).all()
    dataset: Any = work.loader.dataset  # type: ignore[attr-defined]
    assert dataset.lengths == [len(sample[0]) for sample in dataset]


def test_padding_changes_neither_loss_nor_gradient(root: Path) -> None:
    """What is waste may be left out: the honest comparison for everything that removes padding."""
    recipe = small(root)
    recipe.prepare()
    work = recipe.build(0)
    dataset: Any = work.loader.dataset  # type: ignore[attr-defined]
    assert work.loss_fn is not None
    short = min(range(len(dataset)), key=dataset.lengths.__getitem__)
    inputs, targets = pad([dataset[short]])
    longer = nn.functional.pad(inputs, (0, 40)), nn.functional.pad(targets, (0, 40), value=IGNORED)
    found = []
    for batch in ((inputs, targets), longer):
        work.optimizer.zero_grad()
        loss = work.loss_fn(work.model(batch[0]), batch[1])
        loss.backward()
        found.append((loss.item(), work.model.embedding.weight.grad.clone()))  # type: ignore[union-attr]
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert torch.allclose(found[0][1], found[1][1], atol=1e-6)


def test_evaluation_is_in_bits_and_leaves_generator_and_mode_alone(root: Path) -> None:
    recipe = small(root)
    recipe.prepare()
    work = recipe.build(0)
    assert work.evaluate is not None
    before = torch.get_rng_state()
    found = work.evaluate(work.model)
    assert torch.equal(torch.get_rng_state(), before)
    assert work.model.training
    assert set(found) == {"bits_per_byte", "eval_loss"}
    assert found["eval_loss"] == pytest.approx(5.77, abs=0.1)  # ln 320: it knows nothing yet
    assert 0 < found["bits_per_byte"] < found["eval_loss"] / 0.69
    assert work.counters() == {"skipped_files": 0}


def test_held_out_texts_are_not_trained_on(root: Path) -> None:
    recipe = small(root)
    recipe.prepare()
    dataset: Any = recipe.build(0).loader.dataset  # type: ignore[attr-defined]
    assert list(dataset.numbers) == list(range(6, 60))


@pytest.mark.parametrize("tied", [True, False])
def test_the_output_layer(root: Path, tied: bool) -> None:
    recipe = small(root, tied=tied)
    recipe.prepare()
    model: Any = recipe.build(0).model
    assert (model.head.weight is model.embedding.weight) == tied
    assert model.head.out_features == 320


def test_identity_follows_the_files_and_the_vocabulary(root: Path) -> None:
    recipe = small(root)
    before = recipe.identity()
    assert before == recipe.identity() == small(root, width=32).identity()
    assert small(root, vocabulary=321).identity() != before
    (root / "new.txt").write_text("Another text. " * 20)
    assert recipe.identity() != before
    with pytest.raises(PerftrainError, match=r"Call prepare\(\)"):
        recipe.build(0)


def test_unreadable_files_are_counted(root: Path) -> None:
    (root / "bad.txt").write_bytes(b"\xff" * 100)
    with pytest.raises(PerftrainError, match=r"bad\.txt"):
        small(root).prepare()
    recipe = small(root, data=TextData(str(root), "skip"))
    recipe.prepare()
    assert recipe.build(0).counters() == {"skipped_files": 1}


def test_a_batch_larger_than_the_data(root: Path) -> None:
    with pytest.raises(PerftrainError, match=r"seen 54 texts to train on\. Type recipe\.batch_size=54"):
        small(root, batch_size=55).prepare()


def test_yaml_names_every_field_with_its_default(recipe_yaml: Any) -> None:
    raw = recipe_yaml("text")
    assert set(raw) - {"_target_"} == {field.name for field in fields(Text)}
    assert set(raw["data"]) - {"_target_"} == {field.name for field in fields(TextData)}
    assert instantiate(OmegaConf.create(raw)) == Text()


@pytest.mark.parametrize(
    ("field", "value"), [("batch_size", 0), ("vocabulary", 257), ("width", "x"), ("layers", 1.5), ("lr", 0), ("data", "/x"), ("heads", 3)]
)
def test_wrong_values_name_the_field(field: str, value: Any) -> None:
    with pytest.raises(PerftrainError, match=rf"recipe\.{field} .*seen .*{value!r}.* Type recipe\."):
        Text(**{field: value})


def test_wrong_data_values() -> None:
    with pytest.raises(PerftrainError, match=r"one of stop, skip: seen 'ignore'"):
        TextData(on_error="ignore")
    with pytest.raises(PerftrainError, match=r"recipe\.data\.root must be a text: seen 3"):
        TextData(root=3)  # type: ignore[arg-type]


def test_real_tokens_counts_targets() -> None:
    assert real_tokens((torch.zeros(1, 3), torch.tensor([[5, IGNORED, 7]]))) == 2
