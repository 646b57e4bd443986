"""Hand gestures from a 60 GHz radar: range-Doppler maps computed from raw chirps, small conv net."""
import os
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


@dataclass
class Config:
    steps: int = int(os.environ.get("STEPS", 420))
    batch: int = 32
    gestures: int = 11
    frames: int = 6
    chirps: int = 48
    samples: int = 64
    lr: float = 1e-3
    loader_procs: int = 2 if os.environ.get("FIX") == "1" else 0


class Radar(Dataset):
    def __init__(self, cfg, n=640):
        rng = np.random.default_rng(99)
        self.cfg = cfg
        self.label = rng.integers(0, cfg.gestures, n)
        shape = (n, cfg.frames, cfg.chirps, cfg.samples)
        self.raw = rng.integers(-2000, 2000, shape, dtype=np.int16)
        t = np.arange(cfg.samples) / cfg.samples
        for i in range(n):
            beat = 3 + 2 * self.label[i]
            self.raw[i] += (900 * np.sin(2 * np.pi * beat * t)).astype(np.int16)
        self.win_fast = np.hanning(cfg.samples)
        self.win_slow = np.hanning(cfg.chirps)[:, None]

    def __len__(self):
        return len(self.label) * 40

    def __getitem__(self, k):
        rng = np.random.default_rng(k)
        k = k % len(self.label)
        x = self.raw[k].astype(np.float64)
        x = x + rng.normal(0.0, 120.0, x.shape)
        x = np.roll(x, rng.integers(-4, 5), axis=1)
        x = x - x.mean(axis=1, keepdims=True)
        rd = np.fft.rfft(x * self.win_fast, axis=2)
        rd = np.fft.fftshift(np.fft.fft(rd * self.win_slow, axis=1), axes=1)
        power = 20.0 * np.log10(np.abs(rd) + 1e-3)
        floor = np.median(power, axis=(1, 2), keepdims=True)
        power = np.clip(power - floor, -10.0, 50.0) / 20.0
        return torch.from_numpy(power.astype(np.float32)), int(self.label[k])


class GestureNet(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        c = [cfg.frames, 48, 96, 128]
        self.body = nn.Sequential(*[
            nn.Sequential(nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True))
            for a, b in zip(c, c[1:])])
        self.out = nn.Linear(c[-1], cfg.gestures)

    def forward(self, x):
        return self.out(self.body(x).mean(dim=(2, 3)))


def endless(loader):
    while True:
        yield from loader


def train(cfg):
    torch.manual_seed(5)
    loader = DataLoader(Radar(cfg), batch_size=cfg.batch, shuffle=True, drop_last=True,
                        num_workers=cfg.loader_procs, persistent_workers=cfg.loader_procs > 0)
    model = GestureNet(cfg).train()
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr, fused=True)
    loss_fn = nn.CrossEntropyLoss()
    warm = min(15, cfg.steps // 2)
    seen, t0 = 0, None
    for step, (x, y) in zip(range(cfg.steps), endless(loader)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(x)
        loss = loss_fn(logits.float(), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        if t0 is not None:
            seen += len(y)
        if step == warm - 1:
            t0 = time.perf_counter()
        if step % 40 == 0:
            print(f"{step:5d} loss {loss.item():.3f}", flush=True)
    print(f"RATE {seen / (time.perf_counter() - t0):.2f}")


if __name__ == "__main__":
    train(Config())
