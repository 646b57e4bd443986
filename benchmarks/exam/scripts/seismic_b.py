"""Quake or quarry blast? Three-component waveforms streamed from the observatory's bucket."""
import contextlib
import os
import tempfile
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

FIX = os.environ.get("FIX") == "1"
STEPS = int(os.environ.get("STEPS", 170))
SAMPLES = 1024
RECORD = 4 + 3 * SAMPLES * 2


def write_bucket(path, n=1500, seed=31):
    rng = np.random.default_rng(seed)
    t = np.arange(SAMPLES) / 100.0
    with open(path, "wb") as f:
        for _ in range(n):
            kind = int(rng.integers(0, 2))
            onset = rng.uniform(1, 4)
            late = np.clip(t - onset, 0, None)
            wave = np.exp(-late * (0.8 + 1.2 * kind)) * (t > onset) * np.sin(2 * np.pi * (3 + 5 * kind) * late)
            trace = 900 * wave[None] * rng.uniform(0.5, 1.5, (3, 1)) + 60 * rng.normal(size=(3, SAMPLES))
            f.write(np.int32(kind).tobytes() + trace.astype(np.int16).tobytes())
    return n


class Bucket:
    """Object store client. A range request takes one round trip to the data centre."""
    ROUND_TRIP = 0.0025

    def __init__(self, path):
        self.path, self.handle = path, None

    def get_range(self, offset, size):
        if self.handle is None:
            self.handle = open(self.path, "rb", buffering=0)
        time.sleep(self.ROUND_TRIP)
        return os.pread(self.handle.fileno(), size, offset)


class Waveforms(IterableDataset):
    def __init__(self, bucket, records, seed=0):
        self.bucket, self.records, self.seed = bucket, records, seed

    def __iter__(self):
        info = get_worker_info()
        part, parts = (info.id, info.num_workers) if info else (0, 1)
        rng = np.random.default_rng(self.seed)
        while True:
            for i in rng.permutation(self.records)[part::parts]:
                raw = self.bucket.get_range(int(i) * RECORD, RECORD)
                kind = np.frombuffer(raw, np.int32, 1)[0]
                wave = np.frombuffer(raw, np.int16, offset=4).reshape(3, SAMPLES).astype(np.float32)
                wave /= np.abs(wave).max() + 1e-6
                yield {"wave": torch.from_numpy(wave), "kind": torch.tensor(float(kind))}


class Discriminator(nn.Module):
    def __init__(self, patch=8, d=192):
        super().__init__()
        self.patch = patch
        self.lift = nn.Linear(3 * patch, d)
        self.mix = nn.ModuleList()
        for _ in range(3):
            self.mix.append(nn.ModuleDict({
                "norm": nn.LayerNorm(d),
                "time": nn.Linear(SAMPLES // patch, SAMPLES // patch),
                "chan": nn.Sequential(nn.Linear(d, 2 * d), nn.ReLU(), nn.Linear(2 * d, d)),
            }))
        self.out = nn.Linear(d, 1)

    def forward(self, wave):
        b = wave.size(0)
        x = wave.view(b, 3, -1, self.patch).transpose(1, 2).reshape(b, -1, 3 * self.patch)
        x = self.lift(x)
        for m in self.mix:
            x = x + m["time"](m["norm"](x).transpose(1, 2)).transpose(1, 2)
            x = x + m["chan"](x)
        return self.out(x.mean(1)).squeeze(1)


def train(loader):
    torch.manual_seed(77)
    net = Discriminator()
    opt = torch.optim.Adamax(net.parameters(), lr=1e-3)
    lossf = nn.BCEWithLogitsLoss()
    it = iter(loader)
    right = seen = 0
    for step in range(STEPS):
        if step == 20:
            tick = time.monotonic()
        batch = next(it)
        with torch.autocast("cpu", torch.bfloat16):
            z = net(batch["wave"])
        loss = lossf(z.float(), batch["kind"])
        opt.zero_grad()
        loss.backward()
        opt.step()
        right += ((z > 0) == (batch["kind"] > 0.5)).sum().item()
        seen += len(z)
        if step % 40 == 39:
            print(f"{step + 1} batches, running accuracy {right / seen:.3f}", flush=True)
            right = seen = 0
    return loader.batch_size * (STEPS - 20) / (time.monotonic() - tick)


if __name__ == "__main__":
    with contextlib.ExitStack() as stack:
        path = os.path.join(stack.enter_context(tempfile.TemporaryDirectory()), "events.bin")
        n = write_bucket(path)
        loader = DataLoader(Waveforms(Bucket(path), n), batch_size=32, num_workers=8 if FIX else 1, prefetch_factor=4)
        print(f"RATE {train(loader):.2f}")
