"""Spiking network with adaptive thresholds for event-camera digits, unrolled over 16 time bins."""
import os
import time

import torch
from torch import nn
import torch.nn.functional as F

STEPS = int(os.environ.get("STEPS", 260))
FIX = os.environ.get("FIX") == "1"
BATCH, BINS, INPUTS, CELLS, CLASSES = 256, 16, 256, 512, 10


class AdaptiveLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.w_in = nn.Linear(INPUTS, CELLS)
        self.w_rec = nn.Linear(CELLS, CELLS, bias=False)
        nn.init.normal_(self.w_rec.weight, std=0.02)
        self.leak = nn.Parameter(torch.full((CELLS,), 2.0))
        self.fade = nn.Parameter(torch.full((CELLS,), 3.0))
        self.push = nn.Parameter(torch.full((CELLS,), 0.3))
        self.read = nn.Linear(CELLS, CLASSES)

    def forward(self, events):
        b = events.shape[0]
        v = torch.zeros(b, CELLS)
        a = torch.zeros(b, CELLS)
        s = torch.zeros(b, CELLS)
        trace = torch.zeros(b, CELLS)
        keep, fade = torch.sigmoid(self.leak), torch.sigmoid(self.fade)
        push = F.softplus(self.push)
        rates = []
        for t in range(BINS):
            drive = self.w_in(events[:, t]) + self.w_rec(s)
            v = keep * v * (1.0 - s) + (1.0 - keep) * drive.float() * 4.0
            a = fade * a + (1.0 - fade) * s
            gap = v - (0.5 + push * a)
            soft = torch.sigmoid(5.0 * gap) * torch.exp(-0.1 * gap * gap)
            hard = (gap > 0).float()
            s = soft + (hard - soft).detach()
            trace = 0.9 * trace + 0.1 * s
            if FIX:
                rates.append(s.detach().mean())
            else:
                rates.append(s.detach().mean().item())
        return self.read(trace), rates


def recordings(n):
    proto = torch.rand(CLASSES, BINS, INPUTS) * 0.3
    y = torch.randint(0, CLASSES, (n,))
    return (torch.rand(n, BINS, INPUTS) < proto[y]).float(), y


def main():
    torch.manual_seed(404)
    x_all, y_all = recordings(3000)
    layer = AdaptiveLayer()
    fast = torch.compile(layer)
    opt = torch.optim.AdamW(layer.parameters(), lr=1e-3, fused=True)
    warm = min(12, STEPS // 2)
    for step in range(STEPS):
        if step == warm:
            t0 = time.perf_counter()
        i = torch.randint(0, len(x_all), (BATCH,))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits, rates = fast(x_all[i])
        loss = F.cross_entropy(logits.float(), y_all[i])
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        if step % 30 == 0:
            print(f"step {step} loss {loss.item():.4f} firing {sum(map(float, rates)) / BINS:.3f}", flush=True)
    print(f"RATE {(STEPS - warm) * BATCH / (time.perf_counter() - t0):.2f}")


if __name__ == "__main__":
    main()
