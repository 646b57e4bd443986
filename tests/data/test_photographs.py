from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from perftrain.data.photographs import PHOTOGRAPHS, make_photographs, photographs_folder
from perftrain.facts import PerftrainError

pytest.importorskip("skimage")
pytest.importorskip("sklearn")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PERFTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_made_once_and_equal_each_time(cache: Path) -> None:
    folder = make_photographs(2, 1)
    assert folder.parent == cache
    for part, count in (("train", 2), ("val", 1)):
        files = sorted((folder / part).glob("*/*.jpg"))
        assert len(files) == count * len(PHOTOGRAPHS)
    assert Image.open(files[0]).size == (500, 375)
    first, stamp = files[0].read_bytes(), folder.stat().st_mtime_ns
    assert first != (folder / "train" / files[0].parent.name / files[0].name).read_bytes()  # held-out crops are others
    assert make_photographs(2, 1).stat().st_mtime_ns == stamp
    folder.rename(folder.with_name("kept"))
    assert (make_photographs(2, 1) / files[0].relative_to(folder)).read_bytes() == first


def test_two_processes_at_once_and_the_rest_of_a_killed_run(cache: Path) -> None:
    leftover = photographs_folder(3, 1).with_name("photos-1-3+1.partial")
    (leftover / "train" / "half").mkdir(parents=True)
    command = [sys.executable, "-c", "from perftrain.data.photographs import make_photographs as m; print(m(3, 1))"]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [run.communicate(timeout=60) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], answers
    folder = photographs_folder(3, 1)
    assert {out.strip() for out, _ in answers} == {str(folder)}
    assert {path.name for path in cache.iterdir()} <= {folder.name, f"{folder.name}.lock"}
    assert sorted(path.name for path in (folder / "train").iterdir()) == sorted(PHOTOGRAPHS)


def test_a_cache_that_cannot_be_written(cache: Path) -> None:
    cache.parent.mkdir(exist_ok=True)
    cache.write_text("a file in its place")
    with pytest.raises(PerftrainError, match="PERFTRAIN_CACHE=/another/folder"):
        make_photographs(1, 1)


def test_missing_packages_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PerftrainError, match=r"pip install 'perftrain\[recipes\]'"):
        make_photographs(1, 1)
