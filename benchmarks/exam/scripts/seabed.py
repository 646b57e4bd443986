"""Seabed type from multibeam sonar patches. Surveys are kept as gzip tiles, one per ping group."""
import gzip
import os
import shutil
import struct
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

STEPS = int(os.environ.get("STEPS", 420))
FIX = os.environ.get("FIX") == "1"
BATCH, TILE, CROP, TYPES = 24, 288, 96, 5


def survey(folder, n=120):
    rng = np.random.default_rng(17)
    yy, xx = np.mgrid[0:TILE, 0:TILE].astype(np.float32) / TILE
    for i in range(n):
        kind = i % TYPES
        wave = np.sin((6 + 9 * kind) * (xx + 0.4 * rng.random() * yy) * 6.28 + rng.random() * 6)
        depth = 4000 + 900 * yy + 120 * wave + rng.integers(0, 12, (TILE, TILE))
        with gzip.open(folder / f"ping_{i:04d}.sbt.gz", "wb", compresslevel=4) as f:
            f.write(struct.pack("<4sHHH", b"SBT1", kind, TILE, TILE) + depth.astype("<u2").tobytes())


def read_tile(path):
    with gzip.open(path, "rb") as f:
        raw = f.read()
    _, kind, h, w = struct.unpack_from("<4sHHH", raw)
    return np.frombuffer(raw, "<u2", offset=10).reshape(h, w), kind


class Patches(IterableDataset):
    def __init__(self, folder):
        self.paths = sorted(folder.glob("*.gz"))
        self.tiles = {p: read_tile(p) for p in self.paths} if FIX else {}

    def __iter__(self):
        info = get_worker_info()
        rng = np.random.default_rng(100 + (info.id if info else 0))
        while True:
            path = self.paths[rng.integers(len(self.paths))]
            depth, kind = self.tiles[path] if path in self.tiles else read_tile(path)
            a, b = rng.integers(0, TILE - CROP, 2)
            patch = depth[a:a + CROP, b:b + CROP].astype(np.float32)
            patch = (patch - patch.mean()) / (patch.std() + 1)
            yield {"patch": patch[None], "kind": kind}


def stage(i, o):
    return [nn.Conv2d(i, o, 3, 2, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU()]


def build():
    return nn.Sequential(*stage(1, 32), *stage(32, 64), *stage(64, 128), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, TYPES))


def run(folder):
    torch.manual_seed(31)
    loader = DataLoader(Patches(folder), batch_size=BATCH, num_workers=1, prefetch_factor=4)
    net = build().to(memory_format=torch.channels_last)
    opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, nesterov=True, fused=True)
    warm, good, seen = min(15, STEPS // 2), 0, 0
    for step, batch in enumerate(loader):
        if step == STEPS:
            break
        if step == warm:
            t0 = time.perf_counter()
        x = batch["patch"].to(memory_format=torch.channels_last)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = net(x)
        loss = nn.functional.cross_entropy(logits.float(), batch["kind"])
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        seen += len(x)
        if step % 40 == 0:
            print("step %d  loss %.3f  samples %d" % (step, loss.item(), seen), flush=True)
    return (STEPS - warm) * BATCH / (time.perf_counter() - t0)


if __name__ == "__main__":
    folder = Path(tempfile.mkdtemp(prefix="seabed"))
    try:
        survey(folder)
        rate = run(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("RATE %.3f" % rate)
