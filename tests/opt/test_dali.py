"""DALI delivers the samples that a DataLoader would, once an epoch, augmented from the same distribution."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision import transforms

from perftrain import PerftrainError, opt
from perftrain.data.images import JpegFolder
from perftrain.engine.assemble import build_loader

pytest.importorskip("nvidia.dali")

SIDE = 32


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty-three images of one colour each, bright on the left, in three classes."""
    root = tmp_path_factory.mktemp("photos")
    for number in range(23):
        (root / f"class{number % 3}").mkdir(exist_ok=True)
        pixels = np.full((120, 160, 3), 10 * number + 5, np.uint8)
        pixels[:, :80] = np.minimum(pixels[:, :80].astype(int) + 20, 255)
        Image.fromarray(pixels).save(root / f"class{number % 3}" / f"{number:02}.jpg", quality=95)
    return root


def transform(**rest: Any) -> Any:
    return transforms.Compose([transforms.RandomResizedCrop(SIDE, **rest), transforms.RandomHorizontalFlip(), transforms.ToTensor()])


def loader(root: Path, *switches: Any, form: Any = None, **rest: Any) -> Any:
    data = JpegFolder(root, form or transform())
    return build_loader(DataLoader(data, batch_size=4, **rest), switches)[0]


def epoch(made: Any) -> tuple[Tensor, Tensor]:
    parts = [(x.clone(), y.clone()) for x, y in made]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


@pytest.mark.parametrize("drop_last", [False, True])
def test_every_sample_once_and_its_own_label(photos: Path, drop_last: bool) -> None:
    made = loader(photos, opt.Dali(), drop_last=drop_last)
    assert len(made) == (5 if drop_last else 6)
    expected = [label for _, label in JpegFolder(photos).samples][: 20 if drop_last else 23]
    for _ in range(2):
        images, labels = epoch(made)
        assert labels.tolist() == expected
        shades = [int(Path(path).stem) for path, _ in JpegFolder(photos).samples][: len(labels)]
        seen = 255 * images.amin(dim=(1, 2, 3))
        assert [round((float(s) - 5) / 10) for s in seen] == pytest.approx(shades, abs=2)
        assert (images.shape[1:], images.dtype) == ((3, SIDE, SIDE), torch.float32)


def test_the_order_is_the_dataloaders(photos: Path) -> None:
    torch.manual_seed(4)
    plain = [epoch(made)[1].tolist() for made in [loader(photos, shuffle=True)] for _ in range(2)]
    torch.manual_seed(4)
    made = loader(photos, opt.Dali(), shuffle=True)
    first = epoch(made)[1].tolist()
    assert first == plain[0]
    assert sorted(epoch(made)[1].tolist()) == sorted(first)


def test_augmentation_is_from_the_same_distribution(photos: Path) -> None:
    """Mean and spread of pixels, how often images are flipped, and how much of the bright half the crops hold."""

    def facts(*switches: Any) -> tuple[float, float, float, float]:
        torch.manual_seed(1)
        made = loader(photos, *switches)
        images = torch.cat([epoch(made)[0] for _ in range(20)])
        halves = images[..., : SIDE // 2].mean((1, 2, 3)) - images[..., SIDE // 2 :].mean((1, 2, 3))
        return float(images.mean()), float(images.std()), float((halves > 0.01).float().mean()), float(halves.abs().mean())

    torch_facts, dali_facts = facts(), facts(opt.Dali())
    assert dali_facts[0] == pytest.approx(torch_facts[0], abs=0.01)
    assert dali_facts[1] == pytest.approx(torch_facts[1], abs=0.01)
    assert dali_facts[2] == pytest.approx(torch_facts[2], abs=0.1)
    assert dali_facts[3] == pytest.approx(torch_facts[3], rel=0.15)


def test_an_epoch_goes_on_where_it_stopped(photos: Path) -> None:
    torch.manual_seed(2)
    made = loader(photos, opt.Dali(), shuffle=True)
    batches = iter(made)
    before = [next(batches)[1].tolist() for _ in range(2)]
    state = made.state_dict()
    rest = [y.tolist() for _, y in batches]
    other = loader(photos, opt.Dali(), shuffle=True)
    other.load_state_dict(state)
    assert [y.tolist() for _, y in other] == rest
    assert sorted(label for labels in before + rest for label in labels) == sorted(label for _, label in JpegFolder(photos).samples)


def test_out_of_its_turn_nothing_is_made(photos: Path) -> None:
    """A comparison gives the arms turns: what DALI has begun is finished within its own, and used in the next."""
    switch = opt.Dali()
    torch.manual_seed(3)
    expected = epoch(loader(photos, switch, shuffle=True))[1].tolist()
    torch.manual_seed(3)
    made = loader(photos, switch, shuffle=True)
    batches, seen = iter(made), []
    for _ in range(6):
        with switch.process():
            seen += next(batches)[1].tolist()
        assert not made._running
    assert seen == expected


def test_an_unreadable_file_is_named(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    source = next((photos / "class0").iterdir())
    (tmp_path / "a" / "good.jpg").write_bytes(source.read_bytes())
    (tmp_path / "a" / "torn.jpg").write_bytes(source.read_bytes()[:40])
    with pytest.raises(PerftrainError, match=r"torn\.jpg"):
        epoch(loader(tmp_path, opt.Dali()))


def test_what_dali_cannot_do_is_refused(photos: Path) -> None:
    with pytest.raises(PerftrainError, match="scales by"):
        loader(photos, opt.Dali(), form=transform(interpolation=transforms.InterpolationMode.LANCZOS))
    with pytest.raises(PerftrainError, match="no RandomResizedCrop"):
        loader(photos, opt.Dali(), form=transforms.ToTensor())
    with pytest.raises(PerftrainError, match="collate_fn"):
        loader(photos, opt.Dali(), collate_fn=list)
    with pytest.raises(PerftrainError, match=r"dali\.threads"):
        opt.Dali(threads=0)
