"""perftrain's best bundle on photos beside the best loop that somebody writes by hand with the same tricks.

    python benchmarks/switches/by_hand.py [--processes 5] [--opt amp,channels_last,fast_decode]

Both train the photos recipe's ResNet-18 on the same files, in turns within fresh processes, rebuilt every round; the result
is the ratio of their rates (perftrain / by hand) with its 95 % interval, and the same for the step alone (the batches made
beforehand). Written to results/by_hand-<machine>-<date>.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from itertools import repeat
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
ROUNDS, WARM_STEPS, BLOCK_STEPS = 4, 4, 5


# --- by hand ---
class Crops:
    """Decoded no larger than the random crop needs, cropped and resized in one go, kept in bytes."""

    def __init__(self, samples: Any, side: int) -> None:
        self.samples, self.side = samples, side

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        import numpy as np
        import torch
        from PIL import Image
        from torchvision.transforms import RandomResizedCrop

        path, label = self.samples[index]
        image = Image.open(path)
        width, _ = image.size
        top, left, height, across = RandomResizedCrop.get_params(image, (0.08, 1.0), (3 / 4, 4 / 3))
        times = max(1, min(height, across) // self.side)
        image.draft("RGB", (width // times, image.size[1] // times))
        scale = image.size[0] / width
        box = (left * scale, top * scale, (left + across) * scale, (top + height) * scale)
        image = image.convert("RGB").resize((self.side, self.side), Image.Resampling.BILINEAR, box=box)
        pixels = np.asarray(image)
        if random.random() < 0.5:
            pixels = pixels[:, ::-1]
        return torch.from_numpy(pixels.copy()), label


def by_hand(seed: int, fixed: bool) -> Callable[[int], None]:
    import torch
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader

    from perftrain_recipes.photos import MEAN, STD, Photos

    recipe = Photos()
    work = recipe.build(seed)
    model = work.model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.lr, momentum=0.9)
    mean, std = (255 * torch.tensor(x) for x in (MEAN, STD))
    data: Any = work.loader.dataset  # type: ignore[attr-defined]
    loader = DataLoader(Crops(data.samples, recipe.side), recipe.batch_size, shuffle=True, drop_last=True)  # type: ignore[arg-type]
    batches: Iterator[Any] = endless(loader)
    if fixed:
        batches = repeat(next(batches))

    def train(steps: int) -> None:
        for _ in range(steps):
            pixels, labels = next(batches)
            images = ((pixels - mean) / std).permute(0, 3, 1, 2)  # NHWC in memory: channels_last already
            with torch.autocast("cpu", torch.bfloat16):
                loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


# --- with perftrain ---
def with_perftrain(seed: int, fixed: bool, names: list[str]) -> Callable[[int], None]:
    from perftrain import Trainer
    from perftrain.opt import all_switches
    from perftrain_recipes.photos import Photos

    work = Photos().build(seed)
    loader: Any = work.loader
    switches = [all_switches()[name]() for name in names]
    if fixed:
        loader = Repeated(next(iter(loader)), len(loader))
        switches = [s for s in switches if s.card.name in ("amp", "channels_last", "compile", "fused")]
    trainer = Trainer(work.model, work.loss_fn, work.optimizer, loader, opt=switches)
    return lambda steps: trainer.fit(steps=steps) and None


class Repeated:
    """One batch, over and over."""

    def __init__(self, batch: Any, times: int) -> None:
        self.batch, self.times = batch, times

    def __len__(self) -> int:
        return self.times

    def __iter__(self) -> Iterator[Any]:
        return (self.batch for _ in range(self.times))


# --- one process ---
def rounds(names: list[str], fixed: bool, seed: int) -> list[float]:
    """log(seconds by hand / seconds with perftrain) of each round."""
    rng, found = random.Random(seed), []
    for number in range(ROUNDS):
        arms = [by_hand(number, fixed), with_perftrain(number, fixed, names)]
        for train in arms:
            train(WARM_STEPS)
        seconds = [0.0, 0.0]
        first = rng.randrange(2)
        for arm in (first, 1 - first, 1 - first, first) * 2:
            begin = time.perf_counter()
            arms[arm](BLOCK_STEPS)
            seconds[arm] += time.perf_counter() - begin
        found.append(math.log(seconds[0] / seconds[1]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--opt", default="amp,channels_last,fast_decode")
    parser.add_argument("--worker", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--fixed", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.opt.split(",")
    if options.worker is not None:
        print(json.dumps(rounds(names, options.fixed, options.worker)))
        return
    from perftrain.compare.job import steady_malloc
    from perftrain.measure import machine
    from perftrain.measure.statistics import estimate

    described = machine.describe()
    result: dict[str, Any] = {"opt": names, "machine": described, "software": machine.software(), "date": date.today().isoformat()}
    for what, more in (("end_to_end", []), ("step_alone", ["--fixed"])):
        groups = []
        for number in range(options.processes):
            command = [sys.executable, __file__, "--worker", str(number), "--opt", options.opt, *more]
            variables = {**os.environ, "GLIBC_TUNABLES": steady_malloc("")}
            done = subprocess.run(command, env=variables, check=True, capture_output=True, text=True)
            groups.append(json.loads(done.stdout.splitlines()[-1]))
        e = estimate(groups)
        result[what] = {"ratio": e.speedup, "ci95": [e.low, e.high], "groups": groups}
        print(f"{what}: perftrain's rate / by hand = {e.speedup:.3f} [{e.low:.3f}, {e.high:.3f}]", flush=True)
    file = RESULTS / f"by_hand-{machine.machine_id(described)}-{result['date']}.json"
    file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
