from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from PIL import Image

from perftrain.facts import PerftrainError

pytest.importorskip("torchvision")
from perftrain_recipes.photos import PhotoData, Photos


@pytest.fixture
def root(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for label, name in enumerate(("dark", "light")):
        (tmp_path / name).mkdir()
        for i in range(10):
            pixels = rng.integers(0, 100, (60, 80, 3), dtype=np.uint8) + np.uint8(120 * label)
            Image.fromarray(pixels).save(tmp_path / name / f"{i}.jpg")
    return tmp_path


def small(root: Path, **changes: Any) -> Photos:
    return Photos(**{"batch_size": 4, "side": 32, "steps": 8, "warmup_steps": 2, "data": PhotoData(str(root)), **changes})


def losses(recipe: Photos, seed: int) -> list[float]:
    work = recipe.build(seed)
    assert work.loss_fn is not None
    found = []
    for inputs, targets in work.loader:
        loss = work.loss_fn(work.model(inputs), targets)
        work.optimizer.zero_grad()
        loss.backward()
        work.optimizer.step()
        work.scheduler.step()
        found.append(loss.item())
    return found


def test_a_seed_decides_model_order_and_augmentation(root: Path) -> None:
    recipe = small(root)
    recipe.prepare()
    first = losses(recipe, 1)
    assert len(first) == 4  # 18 of 20 images, whole batches only
    assert first == losses(recipe, 1)
    assert first != losses(recipe, 2)


def test_workload_is_plain_pytorch(root: Path) -> None:
    work = small(root, eval_images=1).build(0)
    inputs, targets = next(iter(work.loader))
    assert (inputs.shape, inputs.dtype, targets.shape) == ((4, 3, 32, 32), torch.float32, (4,))
    assert work.model.get_submodule("fc").out_features == 2
    assert work.evaluate is not None
    before = torch.get_rng_state()
    found = work.evaluate(work.model)
    assert torch.equal(torch.get_rng_state(), before)
    assert work.model.training
    assert found["accuracy"] in (0.0, 1.0)
    assert found["eval_loss"] > 0
    assert work.counters() == {"skipped_files": 0}


def test_schedule_rises_falls_and_survives_a_checkpoint(root: Path) -> None:
    work = small(root).build(0)
    rates = []
    for _ in range(12):
        rates.append(work.optimizer.param_groups[0]["lr"] / 0.01)
        work.optimizer.step()
        work.scheduler.step()
    assert rates == pytest.approx([0.5, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0.02, 0.02, 0.02, 0.02])
    other = small(root).build(0)
    other.scheduler.load_state_dict(work.scheduler.state_dict())
    assert other.scheduler.last_epoch == 12


@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_truncated_file(root: Path, on_error: str) -> None:
    recipe = small(root, batch_size=1, data=PhotoData(str(root), on_error))
    recipe.prepare()
    work = recipe.build(0)
    bad = Path(work.loader.dataset.samples[3][0])  # type: ignore[attr-defined]
    bad.write_bytes(bad.read_bytes()[:300])
    if on_error == "stop":
        with pytest.raises(PerftrainError, match=rf"{bad} is not .*recipe\.data\.on_error=skip"):
            list(work.loader)
    else:
        assert len(list(work.loader)) == 18
        assert work.counters() == {"skipped_files": 1}


def test_identity_follows_the_files(root: Path) -> None:
    recipe = small(root)
    before = recipe.identity()
    assert before == recipe.identity()
    (root / "dark" / "new.jpg").write_bytes((root / "dark" / "1.jpg").read_bytes())
    assert recipe.identity() != before
    recipe.prepare()
    assert len(recipe.build(0).loader.dataset) == 19  # type: ignore[attr-defined]


def test_made_photographs_are_known_by_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERFTRAIN_CACHE", str(tmp_path))
    assert Photos().identity() == {"data": "photos-1-120+20"}
    with pytest.raises(PerftrainError, match=r"Call prepare\(\)"):
        Photos().build(0)


def test_a_folder_without_images(tmp_path: Path) -> None:
    with pytest.raises(PerftrainError, match="one folder per class"):
        small(tmp_path).prepare()


def test_a_batch_larger_than_the_data(root: Path) -> None:
    with pytest.raises(PerftrainError, match="seen 18 training images"):
        small(root, batch_size=19).prepare()


def test_yaml_names_every_field_with_its_default(recipe_yaml: Any) -> None:
    raw = recipe_yaml("photos")
    assert set(raw) - {"_target_"} == {field.name for field in fields(Photos)}
    assert set(raw["data"]) - {"_target_"} == {field.name for field in fields(PhotoData)}
    assert instantiate(OmegaConf.create(raw)) == Photos()


@pytest.mark.parametrize(
    ("field", "value"), [("batch_size", "abc"), ("batch_size", 0), ("side", 31), ("lr", 0), ("eval_images", None), ("data", "/x")]
)
def test_wrong_values_name_the_field(field: str, value: Any) -> None:
    with pytest.raises(PerftrainError, match=rf"recipe\.{field} must be .*seen {value!r}. Type recipe\."):
        Photos(**{field: value})


def test_wrong_data_values() -> None:
    with pytest.raises(PerftrainError, match=r"one of stop, skip: seen 'ignore'"):
        PhotoData(on_error="ignore")
    with pytest.raises(PerftrainError, match=r"recipe\.data\.root must be a text: seen 3"):
        PhotoData(root=3)  # type: ignore[arg-type]
