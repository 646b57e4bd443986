"""On-line handwriting: which of 60 symbols does a pen trace show? Traces vary in length."""
import os
import random
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler

FIX = os.environ.get("FIX") == "1"
STEPS = int(os.environ.get("STEPS", 150))
BATCH = 32
SYMBOLS = 60


@dataclass
class Ink:
    points: torch.Tensor
    valid: torch.Tensor
    symbol: torch.Tensor


class Traces(Dataset):
    def __init__(self, n=4000, seed=17):
        rng = np.random.default_rng(seed)
        self.sizes = np.clip(rng.lognormal(3.7, 0.8, n), 10, 320).astype(int)
        self.symbols = rng.integers(0, SYMBOLS, n)
        freq = np.random.default_rng(1).uniform(1, 6, (SYMBOLS, 2))
        self.traces = []
        for m, s in zip(self.sizes, self.symbols):
            t = np.linspace(0, 1, m)[:, None]
            xy = np.sin(2 * np.pi * freq[s] * t) + 0.1 * rng.normal(size=(m, 2))
            d = np.diff(xy, axis=0, prepend=xy[:1])
            pen = (rng.random((m, 1)) > 0.05).astype(float)
            self.traces.append(torch.from_numpy(np.hstack([xy, d, pen])).float())

    def __len__(self):
        return len(self.traces)

    def __getitem__(self, i):
        return self.traces[i], int(self.symbols[i])


def gather(items):
    traces = [t for t, _ in items]
    m = max(len(t) for t in traces)
    points = torch.zeros(len(items), m, 5)
    valid = torch.zeros(len(items), m, dtype=torch.bool)
    for row, t in enumerate(traces):
        points[row, :len(t)] = t
        valid[row, :len(t)] = True
    return Ink(points, valid, torch.tensor([s for _, s in items]))


class PooledBatches(Sampler):
    def __init__(self, sizes, batch, pool=25, seed=2):
        self.sizes, self.batch, self.pool, self.rng = sizes, batch, pool, random.Random(seed)

    def __len__(self):
        return len(self.sizes) // self.batch

    def __iter__(self):
        order = list(range(len(self.sizes)))
        self.rng.shuffle(order)
        out = []
        for i in range(0, len(order), self.pool * self.batch):
            part = sorted(order[i:i + self.pool * self.batch], key=lambda k: self.sizes[k])
            out += [part[j:j + self.batch] for j in range(0, len(part) - self.batch + 1, self.batch)]
        self.rng.shuffle(out)
        return iter(out)


class InkReader(nn.Module):
    def __init__(self, d=128, heads=4, depth=2):
        super().__init__()
        self.inp = nn.Linear(5, d)
        self.register_buffer("rates", torch.exp(torch.linspace(0, -6, d // 2)))
        self.layers = nn.ModuleList([
            nn.TransformerEncoderLayer(d, heads, 2 * d, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(depth)])
        self.out = nn.Linear(d, SYMBOLS)

    def forward(self, points, valid):
        at = torch.arange(points.size(1), dtype=torch.float32)[:, None] * self.rates
        x = self.inp(points) + torch.cat([at.sin(), at.cos()], 1)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=~valid)
        w = valid.unsqueeze(-1).to(x.dtype)
        return self.out((x * w).sum(1) / w.sum(1))


def endless(loader):
    while True:
        yield from loader


def main():
    torch.manual_seed(8)
    data = Traces()
    if FIX:
        loader = DataLoader(data, batch_sampler=PooledBatches(data.sizes, BATCH), collate_fn=gather)
    else:
        loader = DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True, collate_fn=gather)
    model = InkReader()
    opt = torch.optim.NAdam(model.parameters(), lr=5e-4)
    smooth, count, start = None, 0, 0.0
    for step, ink in zip(range(STEPS), endless(loader)):
        if step == 15:
            start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(ink.points, ink.valid).float(), ink.symbol)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        smooth = loss.item() if smooth is None else 0.9 * smooth + 0.1 * loss.item()
        count += len(ink.symbol) if step >= 15 else 0
        if step % 50 == 0:
            print(f"step {step} loss {smooth:.3f}", flush=True)
    print(f"RATE {count / (time.perf_counter() - start):.2f}")


if __name__ == "__main__":
    main()
