"""DeepONet for loaded plates: load field (48x48) -> deflection at free query points."""
import os
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

STEPS = int(os.environ.get("STEPS", 420))
FIX = os.environ.get("FIX") == "1"
BATCH, GRID, POINTS, RANK = 128, 48, 1536, 128


def load_cases(n=1500, modes=5, seed=6):
    rng = np.random.default_rng(seed)
    amp = rng.standard_normal((n, modes, modes))
    u = np.linspace(0, 1, GRID)
    s = np.sin(np.pi * np.outer(np.arange(1, modes + 1), u))
    loads = np.einsum("nij,ix,jy->nxy", amp, s, s, optimize=True).reshape(n, -1).astype(np.float32)
    k = np.arange(1, modes + 1)
    soft = amp / (k[:, None] ** 2 + k[None, :] ** 2) ** 2 * 4
    points = rng.random((20000, 2))
    return torch.from_numpy(loads), torch.from_numpy(soft), torch.from_numpy(points)


def deflection(soft, pts):
    k = torch.arange(1, soft.shape[1] + 1, dtype=pts.dtype) * torch.pi
    sx, sy = torch.sin(pts[:, :1] * k), torch.sin(pts[:, 1:] * k)
    basis = (sx[:, :, None] * sy[:, None, :]).flatten(1)
    return (soft.flatten(1) @ basis.T).float()


def tower(*sizes, act=nn.ReLU):
    parts = []
    for i, o in zip(sizes[:-2], sizes[1:-1]):
        parts += [nn.Linear(i, o), act()]
    return nn.Sequential(*parts, nn.Linear(sizes[-2], sizes[-1]))


class Operator(nn.Module):
    def __init__(self, coords):
        super().__init__()
        self.branch = tower(GRID * GRID, 1024, 1024, 512, RANK)
        self.trunk = tower(2, 256, 256, 256, RANK).to(coords.dtype)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, load, pts):
        modes = self.branch(load)
        shapes = self.trunk(pts).to(modes.dtype)
        return modes @ shapes.T + self.bias


def groups(model):
    yield {"params": model.branch.parameters(), "lr": 3e-4}
    yield {"params": model.trunk.parameters(), "lr": 1e-3}
    yield {"params": [model.bias], "lr": 1e-3}


torch.manual_seed(15)
loads, soft, points = load_cases()
if FIX:
    points, soft = points.float(), soft.float()
model = Operator(points)
optimizers = [torch.optim.AdamW(g["params"], lr=g["lr"], weight_decay=1e-4, fused=True) for g in groups(model)]


def closure():
    case = torch.randint(len(loads), (BATCH,))
    where = points[torch.randint(len(points), (POINTS,))]
    target = deflection(soft[case], where)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        guess = model(loads[case], where)
    loss = F.mse_loss(guess.float(), target)
    for o in optimizers:
        o.zero_grad(set_to_none=True)
    loss.backward()
    for o in optimizers:
        o.step()
    return loss.detach()


warm = min(10, STEPS // 2)
for step in range(STEPS):
    if step == warm:
        start = time.perf_counter()
    loss = closure()
    if step % 50 == 0:
        print(f"step {step:4d}  mse {loss:.5f}", flush=True)
print("RATE %.3f" % ((STEPS - warm) * BATCH / (time.perf_counter() - start)))
