"""Keyword spotting, small set of clips; every round draws the clips the net still gets wrong more often."""
import os
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, Sampler, WeightedRandomSampler

FIX = os.environ.get('FIX') == '1'
STEPS = int(os.environ.get('STEPS', 220))
RATE_HZ, CLIP, WORDS = 16000, 16000, 10
PER_ROUND, BATCH = 192, 32


class Clips(Dataset):
    def __init__(self, n=480, seed=3):
        rng = np.random.default_rng(seed)
        t = np.arange(CLIP) / RATE_HZ
        self.word = rng.integers(0, WORDS, n)
        f = 200 + 150 * self.word[:, None] + rng.normal(0, 20, (n, 1))
        self.wave = (np.sin(2 * np.pi * f * t) * np.exp(-3 * t) * 8000 + rng.normal(0, 1500, (n, CLIP))).astype(np.int16)
        edges = np.linspace(0, 257, 42)
        k = np.arange(257)[:, None]
        self.bank = np.clip(np.minimum((k - edges[:-2]) / np.diff(edges)[:-1], (edges[2:] - k) / np.diff(edges)[1:]), 0, None).astype(np.float32)
        self.window = np.hanning(512).astype(np.float32)

    def __len__(self):
        return len(self.word)

    def __getitem__(self, i):
        x = np.roll(self.wave[i], np.random.randint(-1600, 1600)).astype(np.float32) / 32768
        speed = np.random.uniform(0.95, 1.05)
        x = np.interp(np.arange(CLIP) * speed % CLIP, np.arange(CLIP), x)
        x = x + np.random.normal(0, 0.02, CLIP)
        frames = np.lib.stride_tricks.sliding_window_view(x.astype(np.float32), 512)[::160] * self.window
        spec = np.abs(np.fft.rfft(frames)).astype(np.float32) ** 2 @ self.bank
        return i, torch.from_numpy(np.log(spec + 1e-6).T[None]), int(self.word[i])


class Redraw(Sampler):
    def __init__(self, weights, n):
        self.weights, self.n = weights, n

    def __len__(self):
        return self.n

    def __iter__(self):
        return iter(torch.multinomial(self.weights, self.n, replacement=True).tolist())


def seed_worker(k):
    np.random.seed((torch.initial_seed() + k) % 2 ** 32)


class Net(nn.Module):
    def __init__(self, c=32):
        super().__init__()
        self.stem = nn.Conv2d(1, c, 5, stride=2, padding=2)
        self.body = nn.ModuleList(nn.Sequential(nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c), nn.ReLU()) for _ in range(3))
        self.fc = nn.Linear(c, WORDS)

    def forward(self, x):
        x = F.relu(self.stem(x))
        for b in self.body:
            x = x + b(x)
        return self.fc(x.mean((2, 3)))


def main():
    torch.manual_seed(12)
    clips = Clips()
    weights = torch.ones(len(clips), dtype=torch.double)
    net = Net().to(memory_format=torch.channels_last)
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    options = dict(batch_size=BATCH, num_workers=2, drop_last=True, worker_init_fn=seed_worker)
    kept = DataLoader(clips, sampler=Redraw(weights, PER_ROUND), persistent_workers=True, **options) if FIX else None

    def loader_for_round():
        if kept is not None:
            return kept
        return DataLoader(clips, sampler=WeightedRandomSampler(weights, PER_ROUND), **options)

    step, seen, t0, rounds = 0, 0, None, 0
    while step < STEPS:
        right = 0
        for which, x, y in loader_for_round():
            with torch.autocast('cpu', dtype=torch.bfloat16):
                out = net(x.contiguous(memory_format=torch.channels_last))
            each = F.cross_entropy(out.float(), y, reduction='none')
            opt.zero_grad()
            each.mean().backward()
            opt.step()
            weights[which] = 0.7 * weights[which] + 0.3 * (0.2 + each.detach().double())
            right += (out.argmax(1) == y).sum().item()
            step += 1
            if t0 is not None:
                seen += len(y)
            elif step == 12:
                t0 = time.time()
            if step >= STEPS:
                break
        rounds += 1
        if rounds % 8 == 0:
            print(f'round {rounds} step {step} hits {right}/{PER_ROUND}', flush=True)
    print(f'RATE {seen / (time.time() - t0):.2f}')


if __name__ == '__main__':
    main()
