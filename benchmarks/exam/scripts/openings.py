"""Evaluating chess positions with a deep, narrow residual tower (value head + move-class head).
The weights used for play are a slow average of the training weights."""
import copy
import math
import os
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

STEPS = int(os.environ.get("STEPS", 320))
FIX = os.environ.get("FIX") == "1"
WARMUP = min(15, STEPS // 2)
torch.manual_seed(31)


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, 2 * d)
        self.down = nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.norm(x))))


class Tower(nn.Module):
    def __init__(self, d=96, depth=56):
        super().__init__()
        self.stem = nn.Linear(12 * 64, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(depth))
        self.value = nn.Linear(d, 1)
        self.kind = nn.Linear(d, 24)

    def forward(self, x):
        x = self.stem(x)
        for b in self.blocks:
            x = b(x)
        return torch.tanh(self.value(x)).squeeze(-1), self.kind(x)


class AdamDecoupled(torch.optim.Optimizer):
    """AdamW with the bias correction of the paper."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, decay=0.01):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, decay=decay))

    @torch.no_grad()
    def step(self):
        for g in self.param_groups:
            b1, b2 = g["betas"]
            for p in g["params"]:
                if p.grad is None:
                    continue
                st = self.state[p]
                if not st:
                    st["t"] = 0
                    st["m"] = torch.zeros_like(p)
                    st["v"] = torch.zeros_like(p)
                st["t"] += 1
                st["m"] = b1 * st["m"] + (1 - b1) * p.grad
                st["v"] = b2 * st["v"] + (1 - b2) * p.grad * p.grad
                m_hat = st["m"] / (1 - b1 ** st["t"])
                v_hat = st["v"] / (1 - b2 ** st["t"])
                p.mul_(1 - g["lr"] * g["decay"])
                p.sub_(g["lr"] * m_hat / (v_hat.sqrt() + g["eps"]))


def clip(params, limit):
    total = 0.0
    for p in params:
        total += p.grad.pow(2).sum().item()
    scale = min(1.0, limit / (math.sqrt(total) + 1e-6))
    for p in params:
        p.grad.mul_(scale)


@torch.no_grad()
def follow(slow, fast, keep=0.999):
    for (_, a), (_, b) in zip(slow.named_parameters(), fast.named_parameters()):
        a.copy_(keep * a + (1 - keep) * b)


def positions(n):
    boards = (torch.rand(n, 768) < 32 / 768).float()
    w = torch.randn(768) / 5
    score = torch.tanh(boards @ w)
    kind = ((score + 1) * 12).long().clamp(0, 23)
    return boards, score, kind


boards, score, kind = positions(20000)
net = Tower()
play_net = copy.deepcopy(net)
params = list(net.parameters())
slow_params = list(play_net.parameters())
if FIX:
    opt = torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
else:
    opt = AdamDecoupled(params, lr=1e-3)

start = None
for step in range(STEPS):
    if step == WARMUP:
        start = time.perf_counter()
    pick = torch.randint(0, len(boards), (256,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        v, k = net(boards[pick])
    loss = F.mse_loss(v.float(), score[pick]) + 0.3 * F.cross_entropy(k.float(), kind[pick])
    opt.zero_grad(set_to_none=True)
    loss.backward()
    if FIX:
        nn.utils.clip_grad_norm_(params, 1.0)
        opt.step()
        with torch.no_grad():
            torch._foreach_lerp_(slow_params, params, 0.001)
    else:
        clip(params, 1.0)
        opt.step()
        follow(play_net, net)
    if step % 50 == 0:
        print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)

spent = time.perf_counter() - start
print(f"RATE {(STEPS - WARMUP) * 256 / spent:.2f}")
