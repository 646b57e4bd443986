"""Every way to make images: the same crops and flips as torchvision's transforms, the same files, and what each promises."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset
from torchvision import transforms
from torchvision.datasets import ImageFolder

from perftrain import PerftrainError, Trainer, opt
from perftrain.data import scratch
from perftrain.data.images import JpegFolder
from perftrain.data.keyed import Keyed
from perftrain.engine.assemble import build_loader
from perftrain.opt.base import Switch
from perftrain.opt.seams import Plan

SIDE = 32
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def transform() -> Any:
    crop, flip = transforms.RandomResizedCrop(SIDE), transforms.RandomHorizontalFlip()
    return transforms.Compose([crop, flip, transforms.ToTensor(), transforms.Normalize(MEAN, STD)])


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of smooth images, 200 x 150, as JPEG; class 0 is dark, class 1 bright."""
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for label in range(2):
        (root / f"class{label}").mkdir()
        for number in range(12):
            coarse = rng.integers(0, 128, (6, 8, 3), dtype=np.uint8) + np.uint8(120 * label)
            image = Image.fromarray(coarse).resize((200, 150), Image.Resampling.BICUBIC)
            image.save(root / f"class{label}" / f"{number}.jpg", quality=92)
    return root


def folder(root: Path, kind: str) -> Any:
    if kind == "ours":
        return JpegFolder(root, transform())
    found = ImageFolder(str(root), transform())
    return Subset(found, range(24)) if kind == "subset" else found


def batches(root: Path, *switches: Switch, kind: str = "ours", **rest: Any) -> list[tuple[Tensor, Tensor]]:
    """One epoch in order, each sample's randomness keyed by its index."""
    loader = DataLoader(folder(root, kind), batch_size=8, **rest)
    ordered = sorted(switches, key=lambda s: s.card.place)
    made, after_copy = build_loader(loader, ordered, lambda dataset: Keyed(dataset, 3))
    found = []
    for batch in made:
        for call in after_copy:
            batch = call(batch)
        found.append((batch[0], batch[1]))
    return found


def apart(ours: Sequence[tuple[Tensor, Tensor]], theirs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Root mean square difference of pixels in standard deviations; the labels must be equal."""
    assert [y.tolist() for _, y in ours] == [y.tolist() for _, y in theirs]
    return float((torch.cat([x for x, _ in ours]) - torch.cat([x for x, _ in theirs])).square().mean().sqrt())


CLOSE = [
    (opt.FastDecode(),),
    (opt.TransformsV2(),),
    (opt.DeviceAugment(),),
    (opt.FastDecode(), opt.DeviceAugment()),
    (opt.DeviceAugment(), opt.FastDecode()),
    (opt.TransformsV2(), opt.DeviceAugment()),
]
EXACT = [(opt.DecodeCache(),), (opt.DecodeCache(where="disk", fill=False),), (opt.LocalCopy(),)]


def named(switches: Sequence[Switch]) -> str:
    return "+".join(s.card.name for s in switches)


@pytest.mark.parametrize("kind", ["ours", "torchvision", "subset"])
@pytest.mark.parametrize("switches", CLOSE, ids=named)
def test_crops_and_flips_are_the_same(photos: Path, switches: Sequence[Switch], kind: str) -> None:
    plain, other = batches(photos, kind=kind), batches(photos, *switches, kind=kind)
    spread = float(torch.cat([x for x, _ in plain]).std())
    assert apart(plain, other) < 0.15 * spread  # other crops or flips would be a whole spread apart
    assert all(x.dtype is torch.float32 and x.shape[1:] == (3, SIDE, SIDE) for x, _ in other)


@pytest.mark.parametrize("kind", ["ours", "torchvision", "subset"])
@pytest.mark.parametrize("switches", EXACT, ids=named)
def test_caches_and_copies_change_no_bit(photos: Path, switches: Sequence[Switch], kind: str) -> None:
    for _ in range(2):  # filled the first time, read the second
        assert apart(batches(photos, kind=kind), batches(photos, *switches, kind=kind)) == 0


def test_the_dataset_that_was_given_stays_as_it_is(photos: Path) -> None:
    data = folder(photos, "ours")
    before = (data.loader, data.transform, data.samples)
    for switches in (*CLOSE, *EXACT):
        build_loader(DataLoader(data, batch_size=8), sorted(switches, key=lambda s: s.card.place))
        assert (data.loader, data.transform, data.samples) == before


def test_fast_decode_decodes_fewer_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an image eight times as large as the crop, whatever part of it the crop is."""
    (tmp_path / "a").mkdir()
    Image.fromarray(np.zeros((1024, 1024, 3), np.uint8)).save(tmp_path / "a" / "large.jpg")
    data = JpegFolder(tmp_path, transforms.Compose([transforms.RandomResizedCrop(SIDE, scale=(0.9, 1.0)), transforms.ToTensor()]))
    sizes: list[tuple[int, int]] = []
    convert = Image.Image.convert
    monkeypatch.setattr(Image.Image, "convert", lambda image, mode: sizes.append(image.size) or convert(image, mode))
    made = build_loader(DataLoader(data), [opt.FastDecode()])[0]
    assert next(iter(made))[0].shape == (1, 3, SIDE, SIDE)
    assert sizes == [(128, 128)]


def test_device_augment_passes_bytes(photos: Path) -> None:
    made, after_copy = build_loader(DataLoader(folder(photos, "ours"), batch_size=8), [opt.DeviceAugment()])
    (images, flips), labels = next(iter(made))
    assert (images.dtype, images.shape, flips.dtype, labels.shape) == (torch.uint8, (8, 3, SIDE, SIDE), torch.bool, (8,))
    assert len(after_copy) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_the_cache_decodes_each_file_once(photos: Path, workers: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(scratch.VARIABLE, str(tmp_path))
    data = folder(photos, "ours")
    made = build_loader(DataLoader(data, batch_size=8, num_workers=workers), [opt.DecodeCache(where="disk")])[0]
    monkeypatch.setattr("PIL.Image.Image.convert", lambda *_: pytest.fail("decoded again"))
    assert sum(len(y) for _, y in made) == 24


def test_a_cache_that_does_not_fit_is_refused(photos: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(scratch.VARIABLE, str(tmp_path))
    with pytest.raises(PerftrainError, match="A cache must fit: 24 decoded images"):
        batches(photos, opt.DecodeCache(limit_bytes=1000))


def test_copies_are_read_instead_of_the_files(photos: Path, tmp_path: Path) -> None:
    switch = opt.LocalCopy(folder=str(tmp_path / "fast"))
    dataset: Any = build_loader(DataLoader(folder(photos, "ours"), batch_size=8), [switch])[0].dataset  # type: ignore[union-attr]
    assert all(path.startswith(str(tmp_path / "fast")) for path, _ in dataset.samples)
    assert [os.path.getsize(path) for path, _ in dataset.samples] == [os.path.getsize(path) for path, _ in JpegFolder(photos).samples]


@pytest.mark.parametrize("switch", [opt.FastDecode(), opt.TransformsV2(), opt.DeviceAugment()], ids=lambda s: s.card.name)
def test_transforms_that_are_not_known_are_refused(photos: Path, switch: Switch) -> None:
    data = JpegFolder(photos, transforms.Compose([transforms.RandomResizedCrop(SIDE), transforms.ColorJitter(), transforms.ToTensor()]))
    with pytest.raises(PerftrainError, match="ColorJitter"):
        build_loader(DataLoader(data), [switch])


def test_gpu_decode_needs_a_gpu() -> None:
    assert "CUDA" in opt.GPUDecode().unavailable(Plan())


@pytest.mark.parametrize("switches", [*CLOSE, *EXACT], ids=named)
def test_it_trains(photos: Path, switches: Sequence[Switch]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(folder(photos, "ours"), batch_size=8, shuffle=True)
    trainer = Trainer(model, cross_entropy, optimizer, loader, opt=switches)
    trainer.fit(epochs=12)
    losses = trainer.meter.losses()["loss"]
    assert np.mean(losses[-6:]) < 0.6 * np.mean(losses[:3])
