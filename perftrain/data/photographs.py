"""An image folder of ordinary size, cut from real photographs that scikit-image and scikit-learn ship: nothing is downloaded."""

from __future__ import annotations

import importlib.util
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.progress import Progress

from perftrain.data.user_cache import cache_folder, made_once
from perftrain.facts import PerftrainError

VERSION = 1
"""Raise it whenever a file would come out otherwise: it is part of the folder's name, and so of every fingerprint."""
WIDTH, HEIGHT = 500, 375
"""Pixels; the size of most ImageNet files."""
SKIMAGE, SKLEARN = ("skimage", "data"), ("sklearn", "datasets", "images")
PHOTOGRAPHS = {
    "astronaut": (*SKIMAGE, "astronaut.png", 97),
    "cat": (*SKIMAGE, "chelsea.png", 97),
    "coffee": (*SKIMAGE, "coffee.png", 96),
    "dahlia": (*SKLEARN, "flower.jpg", 97),
    "galaxies": (*SKIMAGE, "hubble_deep_field.jpg", 95),
    "motorcycle": (*SKIMAGE, "motorcycle_left.png", 94),
    "retina": (*SKIMAGE, "retina.jpg", 98),
    "rocket": (*SKIMAGE, "rocket.jpg", 98),
    "temple": (*SKLEARN, "china.jpg", 93),
    "tissue": (*SKIMAGE, "ihc.png", 96),
}
"""Class -> package, folders, file, and the JPEG quality that makes crops of it weigh what ImageNet's files do."""


def photographs_folder(train: int = 120, held_out: int = 20) -> Path:
    """Where :func:`make_photographs` puts the files. The name says the version of the recipe and the files per class."""
    return cache_folder() / f"photos-{VERSION}-{train}+{held_out}"


def make_photographs(train: int = 120, held_out: int = 20) -> Path:
    """Make ``<folder>/{train,val}/<class>/000.jpg`` once, and return the folder. Later calls return at once.

    One class per photograph, ``train`` and ``held_out`` crops of each, 500 x 375 pixels. A crop covers 60 to 100 % of the
    width that fits, at a random place; so photographs under 500 x 375 (the cat, 451 x 300, and crops of most others) are
    scaled up, up to 2.1 times. Held-out crops are other crops **of the same photographs**: accuracy on them says that a
    training learns, not how well it would know another cat.

    Safe under several processes at once, and a run that was killed leaves nothing that is taken for finished.

    Raises:
        PerftrainError: the two packages are not installed, or the cache folder cannot be written.
    """
    folder = photographs_folder(train, held_out)
    if folder.is_dir():
        return folder
    sources = {name: _open(name) for name in PHOTOGRAPHS}
    return made_once(folder, lambda partial: _cut(sources, partial, {"train": train, "val": held_out}), "The photographs need about 120 MB")


def _open(name: str) -> Image.Image:
    package, *path, _quality = PHOTOGRAPHS[name]
    found = importlib.util.find_spec(package)  # finds the files without the second that importing scikit-learn takes
    places = found.submodule_search_locations if found else None
    file = Path(places[0], *path) if places else None
    if file is None or not file.is_file():
        raise PerftrainError(
            f"The photographs come with scikit-image and scikit-learn: {'/'.join((package, *path))} is missing. "
            "Type pip install 'perftrain[recipes]', or recipe.data.root=/path/to/images to use your own."
        )
    return Image.open(file).convert("RGB")


def _cut(sources: dict[str, Image.Image], folder: Path, counts: dict[str, int]) -> None:
    jobs = [(name, part, i) for part, count in counts.items() for name in sources for i in range(count)]
    for name, part in {(name, part) for name, part, _ in jobs}:
        (folder / part / name).mkdir(parents=True)

    def crop(job: tuple[str, str, int]) -> None:
        name, part, i = job
        box = _box(random.Random(f"{part}/{name}/{i}"), *sources[name].size)
        image = sources[name].resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC, box=box)
        image.save(folder / part / name / f"{i:03}.jpg", quality=PHOTOGRAPHS[name][-1])

    # Threads suffice: PIL holds no lock while it resizes and encodes.
    with Progress(console=Console(stderr=True), transient=True) as progress, ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in progress.track(pool.map(crop, jobs), len(jobs), description="Cutting photographs (once)"):
            pass


def _box(rng: random.Random, width: int, height: int) -> tuple[float, float, float, float]:
    """A random box of the wanted shape inside a photograph: left, upper, right, lower."""
    scale = min(width / WIDTH, height / HEIGHT) * rng.uniform(0.6, 1.0)
    left, upper = rng.uniform(0, width - scale * WIDTH), rng.uniform(0, height - scale * HEIGHT)
    return left, upper, left + scale * WIDTH, upper + scale * HEIGHT
