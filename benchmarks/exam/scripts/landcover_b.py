"""Land cover from two tile archives (satellite, aerial), data parallel over two processes."""
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

FIX = os.environ.get("FIX") == "1"
STEPS = int(os.environ.get("STEPS", 160))
WORLD = 2
BATCH = 16
CLASSES = 9
WARMUP = 10
ARCHIVES = {"satellite": dict(side=32, noise=0.8), "aerial": dict(side=128, noise=1.1)}


class Archive:
    def __init__(self, name, seed, n=256):
        self.name = name
        side, noise = ARCHIVES[name]["side"], ARCHIVES[name]["noise"]
        self.g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, CLASSES, (n,), generator=self.g)
        palette = torch.randn(CLASSES, 4, generator=torch.Generator().manual_seed(99))
        self.tiles = palette[self.labels].view(n, 4, 1, 1) + noise * torch.randn(n, 4, side, side, generator=self.g)
        self.tiles = self.tiles.contiguous(memory_format=torch.channels_last)

    def draw(self, k):
        rows = torch.randint(0, len(self.labels), (k,), generator=self.g)
        x = self.tiles[rows]
        if torch.rand((), generator=self.g) < 0.5:
            x = x.flip(3)
        return x.contiguous(memory_format=torch.channels_last), self.labels[rows]


class Residual(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.a = nn.Conv2d(i, o, 3, stride=2, padding=1)
        self.b = nn.Conv2d(o, o, 3, padding=1)
        self.skip = nn.Conv2d(i, o, 1, stride=2)

    def forward(self, x):
        return F.relu(self.skip(x) + self.b(F.relu(self.a(x))))


def network():
    return nn.Sequential(
        nn.Conv2d(4, 32, 3, padding=1), nn.ReLU(),
        Residual(32, 64), Residual(64, 96), Residual(96, 128),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES),
    )


def batches(rank):
    names = list(ARCHIVES)
    sources = [Archive(name, 1000 + 10 * rank + i) for i, name in enumerate(names)]
    step = 0
    while True:
        if FIX:
            yield sources[step % len(sources)].draw(BATCH)
        else:
            yield sources[rank % len(sources)].draw(BATCH)
        step += 1


def worker(rank, rendezvous):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    torch.manual_seed(5)
    net = network().to(memory_format=torch.channels_last)
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=True)
    opt = torch.optim.RMSprop(ddp.parameters(), lr=2e-4, momentum=0.9)
    stream = batches(rank)
    t0 = None
    for step in range(STEPS):
        if step == WARMUP:
            t0 = time.perf_counter()
        x, y = next(stream)
        with torch.autocast("cpu", torch.bfloat16):
            out = ddp(x)
        loss = F.cross_entropy(out.float(), y, label_smoothing=0.05)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0 and step % 40 == 0:
            print(f"[{step:4d}] loss {loss.item():.4f}", flush=True)
    took = time.perf_counter() - t0
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        print(f"RATE {WORLD * BATCH * (STEPS - WARMUP) / took:.2f}", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(os.path.join(folder, "rendezvous"),), nprocs=WORLD)
