# Density model of small colour textures; every pixel channel gets a mixture of discretised logistics.
import os
import time
import torch
import torch.nn as nn
import torch.nn.functional as F

steps = int(os.environ.get('STEPS', 220))
fix = os.environ.get('FIX') == '1'
B, SIDE, MIX = 16, 40, 10
torch.manual_seed(11)


class Masked(nn.Conv2d):
    def __init__(self, i, o, k, first=False):
        super().__init__(i, o, k, padding=k // 2)
        m = torch.ones(k, k)
        m[k // 2, k // 2 + (0 if first else 1):] = 0
        m[k // 2 + 1:] = 0
        self.register_buffer('mask', m[None, None])

    def forward(self, x):
        return F.conv2d(x, self.weight * self.mask, self.bias, padding=self.padding)


class TextureModel(nn.Module):
    def __init__(self, width=64, depth=4):
        super().__init__()
        self.first = Masked(3, width, 5, first=True)
        self.mid = nn.ModuleList(Masked(width, width, 3) for _ in range(depth))
        self.out = nn.Conv2d(width, 3 * 3 * MIX, 1)

    def forward(self, x):
        with torch.autocast('cpu', dtype=torch.bfloat16):
            h = self.first(x)
            for layer in self.mid:
                h = h + layer(F.relu(h))
            h = self.out(F.relu(h))
        return self.nll(x, h.float())

    def nll(self, x, raw):
        b, _, hh, ww = x.shape
        logit, mean, log_s = raw.view(b, 3, 3, MIX, hh, ww).unbind(1)
        x = x.unsqueeze(2)
        log_s = log_s.clamp(min=-7.0)
        inv = torch.exp(-log_s)
        centred = x - torch.tanh(mean)
        hi = inv * (centred + 1 / 255)
        lo = inv * (centred - 1 / 255)
        cdf = torch.sigmoid(hi) - torch.sigmoid(lo)
        log_low = hi - F.softplus(hi)
        log_high = -F.softplus(lo)
        mid = inv * centred
        log_pdf = mid - log_s - 2.0 * F.softplus(mid)
        inner = torch.where(cdf > 1e-5, torch.log(cdf.clamp(min=1e-12)), log_pdf - 4.848)
        part = torch.where(x < -0.999, log_low, torch.where(x > 0.999, log_high, inner))
        part = part + F.log_softmax(logit, dim=2)
        return -torch.logsumexp(part, dim=2).mean()


yy, xx = torch.meshgrid(torch.linspace(0, 6, SIDE), torch.linspace(0, 6, SIDE), indexing='ij')
phase = torch.rand(600, 3, 1, 1) * 6.28
freq = 0.5 + torch.rand(600, 1, 1, 1) * 3
images = torch.sin(freq * xx + phase) * torch.cos(freq * yy - phase)
images = ((images + 0.1 * torch.randn_like(images)).clamp(-1, 1) * 127.5).round() / 127.5

model = TextureModel()
opt = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=True)
run = torch.compile(model) if fix else model
warm = min(10, steps // 2)
for i in range(steps):
    if i == warm:
        t = time.perf_counter()
    x = images[torch.randint(0, 600, (B,))]
    loss = run(x)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    if i % 20 == 0:
        print('step', i, 'nats/dim', round(loss.item(), 4), flush=True)
print('RATE %.3f' % ((steps - warm) * B / (time.perf_counter() - t)))
