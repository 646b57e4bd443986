"""Promoter strength from 128-base DNA windows, small transformer, functional style."""
import math
import os
import time

import torch
import torch.nn.functional as F
from torch import nn

STEPS = int(os.environ.get("STEPS", 190))
FIX = bool(int(os.environ.get("FIX", "0")))
BATCH, LENGTH, DIM = 32, 128, 128
torch.manual_seed(21)


def sequences(n):
    bases = torch.randint(4, (n, LENGTH))
    motif = torch.tensor([3, 0, 3, 0, 0, 3])
    windows = bases.unfold(1, 6, 1)
    score = (windows == motif).sum(-1).float().amax(1) + 0.02 * (bases == 2).float().sum(1)
    return bases, (score - score.mean()) / score.std()


class Layer(nn.Module):
    def __init__(self, d, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.na, self.nb = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x):
        b, l, d = x.shape
        q, k, v = self.qkv(self.na(x)).view(b, l, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, l, d))
        return x + self.down(F.gelu(self.up(self.nb(x))))


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Embedding(4, DIM)
        self.place = nn.Parameter(torch.randn(LENGTH, DIM) * 0.02)
        self.layers = nn.Sequential(*[Layer(DIM) for _ in range(2)])
        self.head = nn.Linear(DIM, 1)

    def forward(self, s):
        return self.head(self.layers(self.base(s) + self.place).mean(1)).squeeze(1)


def half():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def annealing(model, held_out, total, patience=4):
    xs, ys = held_out
    state = {"scale": 1.0, "best": math.inf, "bad": 0}
    refresh = 100 if FIX else 3

    @torch.no_grad()
    def surprise():
        model.eval()
        with half():
            err = sum(F.mse_loss(model(a).float(), b, reduction="sum") for a, b in zip(xs.split(64), ys.split(64)))
        model.train()
        return err.item() / len(xs)

    def factor(step):
        if step and step % refresh == 0:
            now = surprise()
            if now < state["best"] - 1e-3:
                state.update(best=now, bad=0)
            else:
                state["bad"] += 1
            if state["bad"] > patience:
                state.update(scale=max(0.05, state["scale"] * 0.9), bad=0)
        ramp = min(1.0, (step + 1) / 20)
        return ramp * state["scale"] * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, step / total))))

    return factor


def learn(model, data, schedule, opt):
    x, y = data
    while True:
        i = torch.randint(len(x), (BATCH,))
        with half():
            guess = model(x[i])
        loss = F.mse_loss(guess.float(), y[i])
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        schedule.step()
        yield loss


bases, strength = sequences(8000)
model = Reader()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
lr = torch.optim.lr_scheduler.LambdaLR(opt, annealing(model, (bases[-256:], strength[-256:]), STEPS))
warm = min(10, STEPS // 2)
for n, loss in enumerate(learn(model, (bases[:-256], strength[:-256]), lr, opt)):
    if n == warm - 1:
        tic = time.perf_counter()
    if n % 40 == 0:
        print(f"{n:4d} mse {loss.item():.3f} lr {lr.get_last_lr()[0]:.2e}", flush=True)
    if n == STEPS - 1:
        break
toc = time.perf_counter()
print("RATE %.3f" % ((STEPS - warm) * BATCH / (toc - tic)))
