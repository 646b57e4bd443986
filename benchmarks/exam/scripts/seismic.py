"""Picks P and S arrivals in 3-component seismograms with an MLP-mixer over patches."""
import argparse
import os
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

FIX = os.environ.get('FIX') == '1'


def synthesize(n, length, seed):
    rng = np.random.default_rng(seed)
    p = rng.integers(length // 8, length // 2, n)
    s = p + rng.integers(length // 16, length // 3, n)
    t = np.arange(length)
    traces = rng.standard_normal((n, 3, length))
    for onset, gain in ((p, 3.0), (s, 5.0)):
        lag = np.maximum(t[None] - onset[:, None], 0)
        wave = gain * np.sin(lag * 0.25) * np.exp(-lag / 80)
        traces += wave[:, None] * np.array([1.0, 0.6, 0.4])[None, :, None]
    traces -= traces.mean(-1, keepdims=True)
    traces /= traces.std(-1, keepdims=True)
    return traces, np.stack([p, s], 1)


class MixerBlock(nn.Module):
    def __init__(self, tokens, dim):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.across = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.ReLU(), nn.Linear(2 * tokens, tokens))
        self.within = nn.Sequential(nn.Linear(dim, 3 * dim), nn.ReLU(), nn.Linear(3 * dim, dim))

    def forward(self, x):
        x = x + self.across(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.n2(x))


class Picker(nn.Module):
    def __init__(self, length, patch=16, dim=192, depth=3):
        super().__init__()
        self.patch = patch
        self.embed = nn.Linear(3 * patch, dim)
        self.blocks = nn.Sequential(*(MixerBlock(length // patch, dim) for _ in range(depth)))
        self.out = nn.Linear(dim, 2)

    def forward(self, x):
        n, c, t = x.shape
        x = x.view(n, c, t // self.patch, self.patch).transpose(1, 2).flatten(2)
        return self.out(self.blocks(self.embed(x)))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument('--steps', type=int, default=int(os.environ.get('STEPS', 330)))
    ap.add_argument('--batch', type=int, default=16)
    ap.add_argument('--length', type=int, default=1024)
    ap.add_argument('--lr', type=float, default=5e-4)
    a = ap.parse_args()
    torch.manual_seed(4)
    traces, onsets = synthesize(1500, a.length, seed=9)
    traces, onsets = torch.from_numpy(traces), torch.from_numpy(onsets) // 16
    if FIX:
        traces = traces.float()
    net = Picker(a.length).to(traces)
    opt = torch.optim.AdamW(net.parameters(), lr=a.lr, weight_decay=0.02, fused=True)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, a.lr, total_steps=a.steps + 1)
    order = torch.randperm(len(traces))
    seen, clock, err = 0, None, 0.0
    for step in range(1, a.steps + 1):
        idx = order[torch.arange((step - 1) * a.batch, step * a.batch) % len(order)]
        logits = net(traces[idx])
        loss = F.cross_entropy(logits, onsets[idx])
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        sched.step()
        if clock is not None:
            seen += a.batch
        elif step == 8:
            clock = time.perf_counter()
        if step % 25 == 0:
            err = (logits.argmax(1) - onsets[idx]).abs().double().mean().item()
            print(f'step {step} loss {loss.item():.4f} mean pick error {err:.2f} patches', flush=True)
    print(f'RATE {seen / (time.perf_counter() - clock):.3f}')


if __name__ == '__main__':
    main()
