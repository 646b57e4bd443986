"""Texts of very different lengths, as token ids: functions and classes of Python's own library, or the user's files.

Nothing is downloaded. Files are cut into pieces, a vocabulary is counted, and both are kept in the cache folder.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sysconfig
import textwrap
import tokenize
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress

from perftrain.data.user_cache import cache_folder, made_once
from perftrain.facts import PerftrainError

VERSION = 1
"""Raise it whenever a token would come out otherwise: it is part of the folder's name, and so of every fingerprint."""
SUFFIXES = (".py", ".txt", ".md")
ON_ERROR = ("stop", "skip")
SHORTEST, LONGEST = 64, 1024
"""Characters of a piece."""
NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"})
"""Folders that are left out of Python's own library."""
START = 256
"""The id that every sequence begins with; those below are single bytes, those above are words."""
WORD = re.compile(r" ?[^\W\d_]+|\n *| +|.", re.DOTALL)
"""What may become one id: a word with the blank before it, a line's end with the indentation after it, or one character."""


@dataclass(frozen=True)
class TextFiles:
    """The files of a folder, listed once."""

    root: Path
    paths: tuple[str, ...]
    """Below ``root``, sorted."""
    crc32: int
    """Of names, sizes and times of change."""


def list_texts(root: Path | None) -> TextFiles:
    """Every ``SUFFIXES`` file below ``root``, hidden ones left out; ``None``: the sources of Python's own library.

    Raises:
        PerftrainError: there is no such folder, or no text in it.
    """
    library = root is None
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    if not root.is_dir():
        raise PerftrainError(f"A text folder must exist: {root} is not a folder. Type recipe.data.root=/path/to/texts.")
    paths, crc32 = [], 0
    for place, folders, names in os.walk(root, followlinks=not library):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and not (library and f in NOT_LIBRARY))
        for name in sorted(names):
            if name.lower().endswith(SUFFIXES[:1] if library else SUFFIXES) and not name.startswith("."):
                path = os.path.join(place, name)
                stat = os.stat(path)
                paths.append(os.path.relpath(path, root))
                crc32 = zlib.crc32(f"{paths[-1]}/{stat.st_size}/{stat.st_mtime_ns}".encode(), crc32)
    if not paths:
        raise PerftrainError(
            f"A text folder holds {', '.join('*' + s for s in SUFFIXES)} files: {root} holds none, at any depth. "
            "Type recipe.data.root=/another/folder, or leave it out to use Python's own library."
        )
    return TextFiles(root, tuple(sorted(paths)), crc32)


def texts_folder(files: TextFiles, vocabulary: int) -> Path:
    """Where :func:`make_texts` puts what it makes. The name says the version, the files and the size of the vocabulary."""
    return cache_folder() / f"texts-{VERSION}-{files.crc32:08x}-{vocabulary}"


def make_texts(files: TextFiles, vocabulary: int, on_error: str = "stop") -> Path:
    """Cut, count and encode once, and return the folder. Later calls return at once.

    Args:
        vocabulary: ids: 256 bytes, ``START``, and the words that save most, up to this many.
        on_error: for a file that is no UTF-8 text (Python files: not what their coding line says), ``"stop"`` raises,
            ``"skip"`` leaves it out; the folder knows which.

    Raises:
        PerftrainError: a file that cannot be read, too few texts, or a cache folder that cannot be written.
    """

    def make(folder: Path) -> None:
        with Progress(console=Console(stderr=True), transient=True) as progress:
            reading = progress.track(files.paths, description="Reading texts (once)")
            pieces, unreadable = _pieces(files.root, reading, on_error)
            if len(pieces) < 2:
                raise PerftrainError(
                    f"Training and evaluation need a text of {SHORTEST} characters each: {files.root} holds {len(pieces)}. "
                    "Type recipe.data.root=/another/folder."
                )
            words = frequent_words(pieces, vocabulary - START - 1)
            encode = Encoder(words)
            sequences = [encode(piece) for piece in progress.track(pieces, description="Encoding texts (once)")]
        np.save(folder / "tokens.npy", np.concatenate([np.asarray(s, dtype=np.int32) for s in sequences]))
        np.save(folder / "ends.npy", np.cumsum([len(s) for s in sequences]))
        about = {"root": str(files.root), "unreadable": unreadable, "words": words}
        (folder / "about.json").write_text(json.dumps(about), encoding="utf-8")

    folder = made_once(texts_folder(files, vocabulary), make, "The encoded texts need a few MB")
    if on_error == "stop" and (bad := json.loads((folder / "about.json").read_text(encoding="utf-8"))["unreadable"]):
        raise _unreadable(files.root / bad[0], f"{len(bad)} such files")
    return folder


@dataclass(frozen=True)
class Texts:
    """Encoded texts as they lie in the cache."""

    tokens: np.ndarray
    """int32: all texts, one after the other."""
    ends: np.ndarray
    """Where each text ends in ``tokens``."""
    words: tuple[str, ...]
    """The text of the ids above ``START``."""
    unreadable: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> np.ndarray:
        return self.tokens[self.ends[number - 1] if number else 0 : self.ends[number]]

    def bytes_of(self, tokens: Iterable[int]) -> int:
        """Length of the text that the ids stand for, in UTF-8."""
        return sum(1 if token < START else len(self.words[token - START - 1].encode()) for token in tokens)


@lru_cache(maxsize=4)
def load_texts(folder: Path) -> Texts:
    about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    tokens, ends = np.load(folder / "tokens.npy"), np.load(folder / "ends.npy")
    return Texts(tokens, ends, tuple(about["words"]), tuple(about["unreadable"]))


# --- cutting ---
def _pieces(root: Path, paths: Iterable[str], on_error: str) -> tuple[list[str], list[str]]:
    """Every different piece, sorted by its checksum (so neighbours are strangers), and the files that cannot be read."""
    pieces: set[str] = set()
    unreadable = []
    for path in paths:
        try:
            with tokenize.open(root / path) if path.lower().endswith(".py") else open(root / path, encoding="utf-8") as file:
                source = file.read()
        except (UnicodeDecodeError, SyntaxError, OSError) as error:  # SyntaxError: of the coding line
            if on_error == "stop":
                raise _unreadable(root / path, str(error)) from error
            unreadable.append(path)
            continue
        pieces.update(cut_python(source) if path.lower().endswith(".py") else cut_prose(source))
    return sorted(pieces, key=lambda piece: (zlib.crc32(piece.encode()), piece)), unreadable


def _unreadable(path: Path, seen: str) -> PerftrainError:
    return PerftrainError(
        f"Every text must be readable as UTF-8: {path} is not ({seen}). Convert or remove it, or type "
        "recipe.data.on_error=skip to leave such files out, counted."
    )


def cut_python(source: str) -> Iterator[str]:
    """Functions and classes of fitting size; of a class that is too large, its methods."""
    try:
        with warnings.catch_warnings(action="ignore"):
            body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError):  # of another Python than this one
        yield from cut_prose(source)
        return
    lines = source.splitlines(keepends=True)
    while body:
        node = body.pop()
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        piece = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))
        if SHORTEST <= len(piece) <= LONGEST:
            yield piece
        elif isinstance(node, ast.ClassDef) and len(piece) > LONGEST:
            body += node.body


def cut_prose(source: str) -> Iterator[str]:
    """Paragraphs; short ones together with the next, long ones in several pieces."""
    piece = ""
    for paragraph in re.split(r"\n\s*\n", source):
        piece = f"{piece}\n\n{paragraph}" if piece else paragraph
        if len(piece) >= SHORTEST:
            yield from (part for at in range(0, len(piece), LONGEST) if len(part := piece[at : at + LONGEST]) >= SHORTEST)
            piece = ""


# --- encoding ---
def frequent_words(pieces: Iterable[str], count: int) -> list[str]:
    """The ``count`` words that make the texts shortest if each is one id, the best first."""
    seen: Counter[str] = Counter()
    for piece in pieces:
        seen.update(WORD.findall(piece))
    longer = [word for word in seen if len(word.encode()) > 1]
    return sorted(longer, key=lambda word: (-seen[word] * (len(word) - 1), word))[:count]


class Encoder:
    """Text to ids: a word of the vocabulary is one id, any other its longest beginnings that are, down to single bytes."""

    def __init__(self, words: Sequence[str]) -> None:
        self.ids = {word: START + 1 + number for number, word in enumerate(words)}
        self._known: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        return [token for word in WORD.findall(text) for token in self._word(word)]

    def _word(self, word: str) -> list[int]:
        if word not in self._known:
            found: list[int] = []
            at = 0
            while at < len(word):
                end = next((end for end in range(len(word), at, -1) if word[at:end] in self.ids), at + 1)
                part = word[at:end]
                found += [self.ids[part]] if part in self.ids else part.encode()
                at = end
            self._known[word] = found
        return self._known[word]
