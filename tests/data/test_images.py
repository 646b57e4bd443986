from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile
from torch.utils.data import DataLoader

from perftrain.data.images import JpegFolder, UnreadableImage, list_images, train_and_held_out
from perftrain.facts import PerftrainError


def picture(color: int, size: tuple[int, int] = (48, 40)) -> Image.Image:
    noise = np.random.default_rng(color).integers(0, 60, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(noise + np.uint8(color))


def to_tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).float()


def fill(root: Path, classes: str = "ab", images: int = 4) -> Path:
    for label, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(images):
            picture(20 * (label + 1) + i).save(root / name / f"{i}.jpg", quality=90)
    return root


def truncate(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


def epoch(dataset: JpegFolder, workers: int, context: str | None = None) -> list[int]:
    loader = DataLoader(dataset, batch_size=2, num_workers=workers, multiprocessing_context=context)
    return [int(label) for _, labels in loader for label in labels]


def failure(dataset: JpegFolder, workers: int) -> str:
    batches = iter(DataLoader(dataset, batch_size=2, num_workers=workers))
    try:
        for _ in batches:
            pass
    except UnreadableImage as error:
        return str(error)
    finally:  # an error leaves the iterator in a reference cycle, and torch waits 5 s for each worker of one that is collected
        getattr(batches, "_shutdown_workers", lambda: None)()
    raise AssertionError("no file was refused")


def test_reads_classes_images_and_labels(tmp_path: Path) -> None:
    root = fill(tmp_path)
    (root / "b" / "deeper").mkdir()
    picture(3).save(root / "b" / "deeper" / "x.PNG")
    (root / "b" / "notes.txt").write_text("no image")
    (root / "b" / "._0.jpg").write_text("left by another system")
    (root / ".cache").mkdir()
    dataset = JpegFolder(root, to_tensor)
    assert dataset.classes == ["a", "b"]
    assert dataset.class_to_idx == {"a": 0, "b": 1}
    assert dataset.targets == [0] * 4 + [1] * 5
    image, label = dataset[-1]
    assert (image.shape, label) == ((40, 48, 3), 1)
    assert dataset.samples[-1][0].endswith("x.PNG")
    with pytest.raises(IndexError):
        dataset[len(dataset)]


@pytest.mark.parametrize(
    ("make", "seen"),
    [
        (lambda root: root / "absent", "is not a folder"),
        (lambda root: root, "holds none, and 0 images"),
        (lambda root: [picture(1).save(root / "loose.jpg"), root][1], "holds none, and 1 images"),
        (lambda root: [(root / "empty").mkdir(), root][1], "there is none in .* for empty"),
    ],
)
def test_a_folder_without_images_is_refused(tmp_path: Path, make, seen: str) -> None:
    with pytest.raises(PerftrainError, match=seen) as caught:
        JpegFolder(make(tmp_path))
    assert "recipe.data.root=" in str(caught.value)


def test_unknown_on_error_lists_the_choices(tmp_path: Path) -> None:
    with pytest.raises(PerftrainError, match="stop, skip: seen 'ignore'"):
        JpegFolder(fill(tmp_path), on_error="ignore")


@pytest.mark.parametrize("workers", [0, 2])
def test_stop_names_the_truncated_file_and_what_to_type(tmp_path: Path, workers: int) -> None:
    bad = truncate(fill(tmp_path) / "a" / "2.jpg")
    message = failure(JpegFolder(tmp_path, to_tensor), workers)
    assert message.startswith(f"Every image must be readable: {bad} is not (")
    assert "recipe.data.on_error=skip" in message
    assert "Traceback" not in message


@pytest.mark.parametrize(("workers", "context"), [(0, None), (2, "fork"), (1, "spawn")])
def test_skip_takes_the_next_file_names_the_bad_one_once_and_counts_it(
    tmp_path: Path, workers: int, context: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = truncate(fill(tmp_path) / "a" / "3.jpg")
    dataset = JpegFolder(tmp_path, to_tensor, on_error="skip")
    assert epoch(dataset, workers, context) == [0, 0, 0, 1, 1, 1, 1, 1]  # the first of class b stands in, with its own label
    epoch(dataset, 0)
    assert dataset.skipped == 1
    assert capfd.readouterr().err.count(str(bad)) == 1


def test_nothing_readable_at_all_ends_even_when_skipping(tmp_path: Path) -> None:
    for path in fill(tmp_path, "a", 2).glob("a/*"):
        truncate(path)
    with pytest.raises(UnreadableImage, match="none of 2"):
        JpegFolder(tmp_path, on_error="skip")[0]


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "BMP"])
@pytest.mark.parametrize("missing", [1, 100])
def test_pil_takes_no_file_that_ends_early(tmp_path: Path, kind: str, missing: int) -> None:
    data = io.BytesIO()
    picture(9, (200, 150)).save(data, kind)
    fill(tmp_path, "a", 1)
    (tmp_path / "a" / "0.jpg").write_bytes(data.getvalue()[:-missing])
    with pytest.raises(UnreadableImage):
        JpegFolder(tmp_path)[0]


def test_padding_of_truncated_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(PerftrainError, match="LOAD_TRUNCATED_IMAGES is True"):
        JpegFolder(fill(tmp_path))


def test_a_bug_in_the_transform_is_not_taken_for_a_bad_file(tmp_path: Path) -> None:
    def broken(image: Image.Image) -> torch.Tensor:
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$"):
        JpegFolder(fill(tmp_path), broken, on_error="skip")[0]


def test_pickle_and_copy(tmp_path: Path) -> None:
    dataset = JpegFolder(fill(tmp_path), to_tensor)
    for twin in (pickle.loads(pickle.dumps(dataset)), copy.deepcopy(dataset)):
        assert torch.equal(twin[1][0], dataset[1][0])
    error = UnreadableImage("Every image must be readable: x is not.")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_train_and_val_folders_are_used(tmp_path: Path) -> None:
    fill(tmp_path / "train")
    fill(tmp_path / "val", images=1)
    train, held_out = train_and_held_out(tmp_path)
    assert (len(train.samples), len(held_out.samples)) == (8, 2)
    assert train.classes == held_out.classes == ("a", "b")
    fill(tmp_path / "val", "c", 1)
    with pytest.raises(PerftrainError, match=r"same class folders.*'c'"):
        train_and_held_out(tmp_path)


def test_one_folder_is_split_the_same_way_each_time(tmp_path: Path) -> None:
    fill(tmp_path, images=10)
    train, held_out = train_and_held_out(tmp_path)
    assert (len(train.samples), len(held_out.samples)) == (18, 2)
    assert {*train.samples, *held_out.samples} == set(list_images(tmp_path).samples)
    assert train_and_held_out(tmp_path)[0] is train  # listed once
    (tmp_path / "a" / "3.jpg").unlink()
    assert sum(len(part.samples) for part in train_and_held_out(tmp_path)) == 19  # and again when a folder has changed


def test_train_without_val_is_not_read_as_a_class(tmp_path: Path) -> None:
    fill(tmp_path / "train")
    fill(tmp_path / "test")
    with pytest.raises(PerftrainError, match="needs val/"):
        train_and_held_out(tmp_path)
