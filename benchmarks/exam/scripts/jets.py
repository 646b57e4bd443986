"""Tagging of particle jets: is this spray of tracks from a top quark or from QCD?

Launched on the cluster as  srun -c 16 python b1_jets.py ; works on a laptop, too.
"""
import argparse
import math
import os
import time

import torch
import torch.nn.functional as F
from torch import nn

FIX = os.environ.get("FIX") == "1"


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=int(os.environ.get("STEPS", 150)))
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--tracks", type=int, default=32)
    ap.add_argument("--width", type=int, default=96)
    ap.add_argument("--depth", type=int, default=4)
    ap.add_argument("--cpus-per-task", type=int,
                    default=os.cpu_count() if FIX else int(os.environ.get("SLURM_CPUS_PER_TASK", 16)))
    return ap.parse_args()


def simulate(n, tracks, gen):
    """(pt, eta, phi, charge) of each track; tops have three prongs, QCD has one."""
    y = torch.randint(0, 2, (n,), generator=gen)
    prongs = torch.randn(n, 3, 2, generator=gen) * 0.35 * y[:, None, None]
    which = torch.randint(0, 3, (n, tracks), generator=gen)
    centre = torch.gather(prongs, 1, which[..., None].expand(-1, -1, 2))
    angles = centre + 0.12 * torch.randn(n, tracks, 2, generator=gen)
    pt = torch.rand(n, tracks, generator=gen).pow(4).mul(60).add(1).log().sort(1, descending=True).values
    charge = torch.randint(-1, 2, (n, tracks), generator=gen).float()
    return torch.cat([pt[..., None], angles, charge[..., None]], -1), y.float()


class Block(nn.Module):
    def __init__(self, d, heads=4):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(a.transpose(1, 2).reshape(b, n, d))
        return x + self.mlp(self.n2(x))


class Tagger(nn.Module):
    def __init__(self, d, depth):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(4, d), nn.GELU(), nn.Linear(d, d))
        self.blocks = nn.Sequential(*[Block(d) for _ in range(depth)])
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, 1)

    def forward(self, tracks):
        return self.head(self.norm(self.blocks(self.embed(tracks))).mean(1)).squeeze(-1)


def main():
    args = parse()
    torch.set_num_threads(args.cpus_per_task)
    torch.manual_seed(11)
    gen = torch.Generator().manual_seed(12)
    jets, truth = simulate(8192, args.tracks, gen)

    model = Tagger(args.width, args.depth)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    sched = torch.optim.lr_scheduler.LambdaLR(
        opt, lambda s: 0.5 * (1 + math.cos(math.pi * min(1.0, s / max(1, args.steps)))))

    seen, t0 = 0, None
    window = []
    for step in range(args.steps):
        if step == 10:
            t0 = time.perf_counter()
        pick = torch.randint(0, len(jets), (args.batch,), generator=gen)
        x, y = jets[pick], truth[pick]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logit = model(x)
        loss = F.binary_cross_entropy_with_logits(logit.float(), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        sched.step()
        window.append(loss.detach())
        if t0 is not None:
            seen += len(y)
        if (step + 1) % 25 == 0:
            print(f"{step + 1:5d}  bce {torch.stack(window).mean().item():.4f}", flush=True)
            window.clear()
    print(f"RATE {seen / (time.perf_counter() - t0):.2f}")


if __name__ == "__main__":
    main()
