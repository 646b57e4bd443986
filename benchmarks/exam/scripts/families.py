"""Protein family classifier: transformer encoder over residues."""
import os
import tempfile
import time
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

FIX = os.environ.get('FIX') == '1'


@dataclass
class Config:
    steps: int = int(os.environ.get('STEPS', 130))
    batch: int = 16
    length: int = 96
    dim: int = 256
    layers: int = 4
    heads: int = 4
    families: int = 40
    lr: float = 3e-4
    smooth: float = 0.97
    min_gap: int = 100 if FIX else 1


def make_sequences(cfg, n=6000):
    g = torch.Generator().manual_seed(77)
    profile = torch.randn(cfg.families, 20, generator=g).mul(0.7).softmax(1)
    y = torch.randint(0, cfg.families, (n,), generator=g)
    x = torch.multinomial(profile[y], cfg.length, replacement=True, generator=g)
    return x, y


class Encoder(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.residue = nn.Embedding(20, cfg.dim)
        self.place = nn.Parameter(torch.randn(cfg.length, cfg.dim) * 0.02)
        layer = nn.TransformerEncoderLayer(cfg.dim, cfg.heads, 4 * cfg.dim, dropout=0.0, activation='gelu', batch_first=True, norm_first=True)
        self.trunk = nn.TransformerEncoder(layer, cfg.layers, enable_nested_tensor=False)
        self.out = nn.Linear(cfg.dim, cfg.families)

    def forward(self, x):
        return self.out(self.trunk(self.residue(x) + self.place).mean(1))


class BestKeeper:
    """Keeps the best state on disk, by smoothed training loss."""

    def __init__(self, cfg, folder):
        self.path = os.path.join(folder, 'best.pt')
        self.cfg, self.level, self.best, self.last, self.writes = cfg, None, float('inf'), 0, 0

    def __call__(self, step, loss, **parts):
        s = self.cfg.smooth
        self.level = loss if self.level is None else s * self.level + (1 - s) * loss
        if self.level < self.best and step - self.last >= self.cfg.min_gap:
            self.best, self.last = self.level, step
            torch.save({'step': step, 'loss': self.level, **{k: v.state_dict() for k, v in parts.items()}}, self.path + '.tmp')
            os.replace(self.path + '.tmp', self.path)
            self.writes += 1


def run(cfg):
    torch.manual_seed(1)
    x, y = make_sequences(cfg)
    net = Encoder(cfg)
    opt = torch.optim.AdamW(net.parameters(), lr=cfg.lr, weight_decay=0.01, fused=True)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 30))
    with tempfile.TemporaryDirectory() as folder:
        keeper = BestKeeper(cfg, folder)
        n, t0 = 0, None
        for step in range(1, cfg.steps + 1):
            idx = torch.randint(0, len(x), (cfg.batch,))
            with torch.autocast('cpu', dtype=torch.bfloat16):
                logits = net(x[idx])
            loss = F.cross_entropy(logits.float(), y[idx], label_smoothing=0.05)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            sched.step()
            keeper(step, loss.item(), net=net, opt=opt, sched=sched)
            if t0 is not None:
                n += cfg.batch
            elif step == 8:
                t0 = time.perf_counter()
            if step % 25 == 0:
                print(f'step {step} smoothed loss {keeper.level:.4f} best {keeper.best:.4f}', flush=True)
        return n / (time.perf_counter() - t0)


if __name__ == '__main__':
    print(f'RATE {run(Config()):.2f}')
