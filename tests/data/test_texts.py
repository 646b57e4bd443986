from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from perftrain.data.texts import (
    LONGEST,
    SHORTEST,
    START,
    Encoder,
    cut_prose,
    cut_python,
    frequent_words,
    list_texts,
    load_texts,
    make_texts,
)
from perftrain.facts import PerftrainError

FUNCTION = '@cache\ndef area(width, height):\n    """Of a rectangle, in square units."""\n    return width * height\n'


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PERFTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "texts" / "deep").mkdir(parents=True)
    for number in range(6):
        (tmp_path / "texts" / "deep" / f"{number}.py").write_text(FUNCTION.replace("area", f"area_{number}"))
    (tmp_path / "texts" / "notes.md").write_text("A paragraph, über allem, long enough to stand alone among the texts.\n\nShort.\n")
    (tmp_path / "texts" / "image.jpg").write_bytes(b"\xff\xd8")
    return tmp_path / "texts"


def text_of(tokens: list[int], words: tuple[str, ...]) -> str:
    return b"".join(words[t - START - 1].encode() if t > START else bytes([t]) for t in tokens).decode()


def test_encoding_loses_nothing(root: Path) -> None:
    texts = load_texts(make_texts(list_texts(root), vocabulary=300))
    assert len(texts) == 7
    decoded = [text_of(texts[n].tolist(), texts.words) for n in range(len(texts))]
    assert "A paragraph, über allem, long enough to stand alone among the texts." in decoded
    assert sum(text.startswith("def area_") for text in decoded) == 6
    assert [texts.bytes_of(texts[n].tolist()) for n in range(len(texts))] == [len(text.encode()) for text in decoded]
    assert len(texts.words) <= 300 - START - 1
    assert max(len(texts[n]) for n in range(7)) < min(map(len, decoded))


def test_words_are_the_ones_that_save_most_and_others_are_spelled() -> None:
    words = frequent_words(["return value", "return return other"], 2)
    assert words == ["return", " return"]
    encode = Encoder(["over", "overhead"])
    assert encode("overhead") == [START + 2]
    assert encode("overhaul") == [START + 1, *b"haul"]
    assert encode("ü") == list("ü".encode())


def test_classes_that_are_too_large_give_their_methods() -> None:
    method = "    def method_{0}(self):\n" + "        return self.something_that_has_a_long_name + {0}\n" * 3
    source = "class Large:\n" + "\n".join(method.format(n) for n in range(12))
    pieces = list(cut_python(source))
    assert len(pieces) == 12
    assert all(piece.startswith("def method_") for piece in pieces)
    assert list(cut_python("class Small:\n" + method.format(1))) == ["class Small:\n" + method.format(1)]
    assert list(cut_python("def tiny(): pass")) == []


def test_prose_is_cut_at_paragraphs() -> None:
    pieces = list(cut_prose("short\n\n" + "a" * 100 + "\n\n" + "b" * 2500 + "\n\nend"))
    assert [len(piece) for piece in pieces] == [107, LONGEST, LONGEST, 2500 - 2 * LONGEST]
    assert list(cut_prose("def broken(:\n" + "x" * SHORTEST)) == list(cut_python("def broken(:\n" + "x" * SHORTEST))


def test_made_once_and_equal_each_time(root: Path, cache: Path) -> None:
    files = list_texts(root)
    folder = make_texts(files, 300)
    assert folder.parent == cache
    stamp, tokens = folder.stat().st_mtime_ns, (folder / "tokens.npy").read_bytes()
    assert make_texts(list_texts(root), 300) == folder
    assert folder.stat().st_mtime_ns == stamp
    folder.rename(folder.with_name("kept"))
    assert (make_texts(files, 300) / "tokens.npy").read_bytes() == tokens
    assert make_texts(files, 301) != folder
    (root / "notes.md").write_text("Changed. " * 20)
    assert make_texts(list_texts(root), 300) != folder


def test_two_processes_at_once_and_the_rest_of_a_killed_run(root: Path, cache: Path) -> None:
    source = f"from perftrain.data.texts import *; from pathlib import Path; print(make_texts(list_texts(Path({str(root)!r})), 300))"
    name = make_texts(list_texts(root), 301).name.replace("-301", "-300")
    (cache / f"{name}.partial" / "half").mkdir(parents=True)
    runs = [subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [run.communicate(timeout=60) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], answers
    assert {out.strip() for out, _ in answers} == {str(cache / name)}
    assert sorted(path.name for path in (cache / name).iterdir()) == ["about.json", "ends.npy", "tokens.npy"]
    assert not (cache / f"{name}.partial").exists()


def test_python_files_are_read_as_their_coding_line_says(root: Path) -> None:
    source = "# coding: latin-1\n" + FUNCTION.replace("square units", "größe, in units of its own")
    (root / "latin.py").write_bytes(source.encode("latin-1"))
    texts = load_texts(make_texts(list_texts(root), 300))
    assert sum("größe" in text_of(texts[n].tolist(), texts.words) for n in range(len(texts))) == 1


def test_an_unreadable_file_is_named_or_counted(root: Path) -> None:
    (root / "bad.txt").write_bytes(b"\xff\xfe\xfa" * 50)
    with pytest.raises(PerftrainError, match=r"bad\.txt is not .*recipe\.data\.on_error=skip"):
        make_texts(list_texts(root), 300)
    assert load_texts(make_texts(list_texts(root), 300, "skip")).unreadable == ("bad.txt",)
    with pytest.raises(PerftrainError, match=r"bad\.txt is not .*1 such files"):  # though it is made already
        make_texts(list_texts(root), 300, "stop")


def test_folders_that_will_not_do(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(PerftrainError, match=r"missing is not a folder\. Type recipe\.data\.root="):
        list_texts(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(PerftrainError, match=r"\*\.py, \*\.txt, \*\.md files: .* holds none"):
        list_texts(tmp_path / "empty")
    (tmp_path / "empty" / "short.txt").write_text("short")
    with pytest.raises(PerftrainError, match=r"64 characters each: .* holds 0"):
        make_texts(list_texts(tmp_path / "empty"), 300)
    assert not any(path.suffix == "" for path in cache.iterdir() if path.is_dir() and not path.name.endswith(".partial"))


def test_a_cache_that_cannot_be_written(root: Path, cache: Path) -> None:
    cache.write_text("a file in its place")
    with pytest.raises(PerftrainError, match="PERFTRAIN_CACHE=/another/folder"):
        make_texts(list_texts(root), 300)


def test_the_library_leaves_tests_and_packages_out() -> None:
    files = list_texts(None)
    assert "argparse.py" in files.paths
    assert not any({"test", "tests", "site-packages"} & set(Path(path).parts) for path in files.paths)
    assert files == list_texts(None)
