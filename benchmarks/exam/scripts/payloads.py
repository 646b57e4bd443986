"""Guess the protocol of a packet from its first 128 payload bytes (MLP-Mixer)."""
import io
import os
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIX = os.environ.get("FIX") == "1"


@dataclass
class Config:
    steps: int = int(os.environ.get("STEPS", 260))
    batch: int = 32
    length: int = 128
    width: int = 256
    depth: int = 3
    classes: int = 12
    lr: float = 8e-4
    eval_every: int = 100
    save_every: int = 200


def make_payloads(cfg, n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(cfg.classes, (n,), generator=g)
    proto = torch.randint(256, (cfg.classes, cfg.length), generator=torch.Generator().manual_seed(99))
    x = proto[y]
    noise = torch.randint(256, x.shape, generator=g)
    keep = torch.rand(x.shape, generator=g) < 0.12
    return TensorDataset(torch.where(keep, x, noise), y)


class MixerBlock(nn.Module):
    def __init__(self, length, width):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.t1, self.t2 = nn.Linear(length, 2 * length), nn.Linear(2 * length, length)
        self.c1, self.c2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        h = self.n1(x).transpose(1, 2)
        x = x + self.t2(F.relu(self.t1(h))).transpose(1, 2)
        return x + self.c2(F.relu(self.c1(self.n2(x))))


class ByteMixer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.emb = nn.Embedding(256, cfg.width)
        self.blocks = nn.Sequential(*[MixerBlock(cfg.length, cfg.width) for _ in range(cfg.depth)])
        self.norm = nn.LayerNorm(cfg.width)
        self.head = nn.Linear(cfg.width, cfg.classes)

    def forward(self, b):
        return self.head(self.norm(self.blocks(self.emb(b))).mean(1))


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        torch.manual_seed(5)
        self.model = ByteMixer(cfg)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr, weight_decay=0.02, fused=True)
        self.train_set = make_payloads(cfg, 12000, 1)
        self.dev_set = make_payloads(cfg, 96, 2)
        self.history = []

    def batches(self):
        if FIX:
            x, y = self.train_set.tensors
            while True:
                i = torch.randint(len(x), (self.cfg.batch,))
                yield x[i], y[i]
        loader = DataLoader(self.train_set, batch_size=self.cfg.batch, shuffle=True, num_workers=0, drop_last=True)
        while True:
            yield from loader

    def step(self, x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(self.model(x).float(), y)
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.opt.step()
        return loss.detach()

    @torch.inference_mode()
    def evaluate(self):
        self.model.eval()
        x, y = self.dev_set.tensors
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hits = (self.model(x).argmax(1) == y).float().mean()
        self.model.train()
        return hits.item()

    def save(self):
        buf = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "opt": self.opt.state_dict()}, buf)
        return buf.tell()

    def fit(self):
        cfg, feed = self.cfg, self.batches()
        warm = min(10, cfg.steps // 2)
        for i in range(cfg.steps):
            if i == warm:
                t0 = time.perf_counter()
            loss = self.step(*next(feed))
            if FIX:
                continue
            self.history.append(loss.item())
            if i % 20 == 0:
                print(f"{i:5d}  loss {sum(self.history[-20:]) / len(self.history[-20:]):.4f}", flush=True)
            if (i + 1) % cfg.eval_every == 0:
                print(f"{i:5d}  dev accuracy {self.evaluate():.3f}", flush=True)
            if (i + 1) % cfg.save_every == 0:
                print(f"{i:5d}  saved {self.save() / 1e6:.1f} MB", flush=True)
        return (cfg.steps - warm) * cfg.batch / (time.perf_counter() - t0)


if __name__ == "__main__":
    rate = Trainer(Config()).fit()
    print("RATE %.3f" % rate)
