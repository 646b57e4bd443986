"""Streaming load forecast for a wind park. Windows arrive in order; a slow site memory rides along with the fast encoder."""
import os
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

FIX = os.environ.get('FIX') == '1'
STEPS = int(os.environ.get('STEPS', 420))
SITES, CHANNELS, WINDOW = 64, 8, 64


def stream(seed=17):
    """Yields (window, next mean load) for all sites, endlessly, in time order."""
    g = torch.Generator().manual_seed(seed)
    drift = torch.zeros(SITES, CHANNELS)
    level = torch.randn(SITES, CHANNELS, generator=g)
    t = torch.arange(WINDOW) / WINDOW
    while True:
        drift = 0.98 * drift + 0.2 * torch.randn(SITES, CHANNELS, generator=g)
        phase = torch.rand(SITES, CHANNELS, 1, generator=g)
        x = (level + drift).unsqueeze(-1) + torch.sin(6.28 * (t + phase)) + 0.2 * torch.randn(SITES, CHANNELS, WINDOW, generator=g)
        yield x, (level + 0.98 * drift).mean(1)


class SiteMemory(nn.Module):
    def __init__(self, dim, keep=0.97):
        super().__init__()
        self.write = nn.Linear(CHANNELS * WINDOW, dim)
        self.keep = keep
        self.slow = torch.zeros(SITES, dim)

    def forward(self, x):
        past = self.slow.detach() if FIX else self.slow
        self.slow = self.keep * past + (1 - self.keep) * torch.tanh(self.write(x.flatten(1)))
        return self.slow


class Forecaster(nn.Module):
    def __init__(self, width=96, dim=128):
        super().__init__()
        self.inp = nn.Conv1d(CHANNELS, width, 5, padding=2)
        self.convs = nn.ModuleList(nn.Conv1d(width, width, 5, padding=2 * 2 ** i, dilation=2 ** i) for i in range(3))
        self.memory = SiteMemory(dim)
        self.head = nn.Sequential(nn.Linear(width + dim, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, x):
        h = self.inp(x)
        for conv in self.convs:
            h = h + F.relu(conv(h))
        return self.head(torch.cat([h.mean(-1).float(), self.memory(x)], 1)).squeeze(1)


class Online:
    def __init__(self):
        torch.manual_seed(2)
        self.net = Forecaster()
        self.opt = torch.optim.Adam(self.net.parameters(), lr=5e-4, fused=True)
        self.mae = 1.0

    def learn(self, x, y):
        with torch.autocast('cpu', dtype=torch.bfloat16):
            guess = self.net(x)
        loss = F.huber_loss(guess.float(), y)
        self.opt.zero_grad()
        loss.backward(retain_graph=not FIX)
        self.opt.step()
        self.mae = 0.98 * self.mae + 0.02 * (guess.detach().float() - y).abs().mean().item()


def main():
    job, seen, t0 = Online(), 0, None
    for step, (x, y) in enumerate(stream(), 1):
        job.learn(x, y)
        if t0 is not None:
            seen += SITES
        elif step == 10:
            t0 = time.monotonic()
        if step % 50 == 0:
            print(f'window {step}: running MAE {job.mae:.4f}', flush=True)
        if step >= STEPS:
            break
    print('RATE %.2f' % (seen / (time.monotonic() - t0)))


main()
