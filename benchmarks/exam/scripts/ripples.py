# Small denoising-diffusion model for ripple patterns (32x32, one channel, class conditional).
import copy
import math
import os
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(77)
STEPS = int(os.environ.get("STEPS", 480))
FIX = os.environ.get("FIX", "0") == "1"
BATCH, CH, T, KINDS = 16, 96, 400, 6

betas = torch.linspace(1e-4, 0.03, T)
abar = torch.cumprod(1 - betas, 0)


def ripples(n):
    u = torch.linspace(-1, 1, 32)
    yy, xx = torch.meshgrid(u, u, indexing="ij")
    kind = torch.randint(KINDS, (n,))
    cx, cy = torch.rand(2, n, 1, 1) - 0.5
    r = ((xx - cx) ** 2 + (yy - cy) ** 2).sqrt()
    img = torch.cos(r * (4 + 5 * kind.view(-1, 1, 1)) + 6.28 * torch.rand(n, 1, 1))
    return img.unsqueeze(1).contiguous(memory_format=torch.channels_last), kind


class Res(nn.Module):
    def __init__(self, cin, cout, cond):
        super().__init__()
        self.a = nn.Conv2d(cin, cout, 3, padding=1, bias=False)
        self.b = nn.Conv2d(cout, cout, 3, padding=1)
        self.bn = nn.BatchNorm2d(cout)
        self.film = nn.Linear(cond, cout)
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x, c):
        h = F.relu(self.bn(self.a(x)) + self.film(c)[:, :, None, None])
        return F.relu(self.b(h) + self.skip(x))


class Denoiser(nn.Module):
    def __init__(self, cond=128):
        super().__init__()
        self.stem = nn.Conv2d(1, CH, 4, stride=2, padding=1)
        self.d1 = Res(CH, CH, cond)
        self.down = nn.Conv2d(CH, 2 * CH, 2, stride=2)
        self.d2 = Res(2 * CH, 2 * CH, cond)
        self.mid = Res(2 * CH, 2 * CH, cond)
        self.up = nn.ConvTranspose2d(2 * CH, CH, 2, stride=2)
        self.u1 = Res(2 * CH, CH, cond)
        self.u2 = Res(CH, CH, cond)
        self.out = nn.ConvTranspose2d(CH, 1, 4, stride=2, padding=1)

    def forward(self, x, c):
        a = self.d1(self.stem(x), c)
        b = self.mid(self.d2(F.relu(self.down(a)), c), c)
        return self.out(self.u2(self.u1(torch.cat([a, self.up(b)], 1), c), c))


class Condition(nn.Module):
    def __init__(self, cond=128):
        super().__init__()
        self.register_buffer("freq", torch.exp(torch.linspace(0, -math.log(1000), 32)))
        self.kind = nn.Embedding(KINDS, 64)
        self.mlp = nn.Sequential(nn.Linear(128, cond), nn.SiLU(), nn.Linear(cond, cond))

    def forward(self, t, kind):
        p = t[:, None] * self.freq
        return self.mlp(torch.cat([p.sin(), p.cos(), self.kind(kind)], 1))


images, kinds = ripples(4096)
unet = Denoiser().to(memory_format=torch.channels_last)
embed = Condition()
shadow = copy.deepcopy(unet).requires_grad_(False)
opt_net = torch.optim.AdamW(unet.parameters(), lr=4e-4, fused=True)
opt_cond = torch.optim.Adam(embed.parameters(), lr=1e-3, fused=True)
live, avg = [p.data for p in unet.parameters()], [p.data for p in shadow.parameters()]


def training_step(x0, kind):
    t = torch.randint(T, (len(x0),))
    eps = torch.randn_like(x0)
    s = abar[t].view(-1, 1, 1, 1)
    xt = s.sqrt() * x0 + (1 - s).sqrt() * eps
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pred = unet(xt, embed(t.float(), kind))
    loss = F.mse_loss(pred.float(), eps)
    for o in (opt_net, opt_cond):
        o.zero_grad(set_to_none=True)
    loss.backward()
    for o in (opt_net, opt_cond):
        o.step()
    return loss


warm = min(10, STEPS // 2)
smooth = None
for n in range(STEPS):
    if n == warm:
        start = time.perf_counter()
    pick = torch.randint(len(images), (BATCH,))
    x0 = images[pick].contiguous(memory_format=torch.channels_last)
    loss = training_step(x0, kinds[pick])
    if not FIX:
        with torch.no_grad():
            torch._foreach_lerp_(avg, live, 0.005)
            for a, b in zip(shadow.buffers(), unet.buffers()):
                a.copy_(b)
        value = loss.item()
        smooth = value if smooth is None else 0.97 * smooth + 0.03 * value
        if n % 25 == 0:
            print("step %4d  mse %.4f" % (n, smooth), flush=True)
seconds = time.perf_counter() - start
print("RATE %.3f" % ((STEPS - warm) * BATCH / seconds))
