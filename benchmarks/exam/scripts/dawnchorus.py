# Multi-label tagging of dawn-chorus recordings (96 species), data parallel on two processes.
import os
import socket
import time
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = int(os.environ.get('STEPS', 220))
FIX = os.environ.get('FIX', '0') == '1'
SPECIES, BATCH, WORLD = 96, 24, 2


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        chans = [1, 32, 64, 96, 128]
        layers = []
        for a, b in zip(chans[:-1], chans[1:]):
            layers += [nn.Conv2d(a, b, 3, stride=2, padding=1), nn.GroupNorm(8, b), nn.SiLU()]
        self.trunk = nn.Sequential(*layers)
        self.head = nn.Linear(128, SPECIES)

    def forward(self, mel):
        return self.head(self.trunk(mel).mean((2, 3)))


class SpeciesCounts:
    """Hits, false alarms and misses for every species over all ranks, with an exponential memory."""

    def __init__(self):
        self.table = {k: torch.zeros(SPECIES) for k in ('tp', 'fp', 'fn')}

    def update(self, logits, target):
        said = logits > 0
        true = target > 0.5
        now = {'tp': (said & true).sum(0).float(),
               'fp': (said & ~true).sum(0).float(),
               'fn': (~said & true).sum(0).float()}
        if FIX:
            flat = torch.cat([now['tp'], now['fp'], now['fn']])
            dist.all_reduce(flat)
            now = dict(zip(('tp', 'fp', 'fn'), flat.split(SPECIES)))
            for key in self.table:
                self.table[key].mul_(0.98).add_(now[key])
            return
        for key, counts in now.items():
            for s in range(SPECIES):
                dist.all_reduce(counts[s])
            self.table[key].mul_(0.98).add_(counts)

    def macro_f1(self):
        t = self.table
        return (2 * t['tp'] / (2 * t['tp'] + t['fp'] + t['fn']).clamp(min=1)).mean().item()


def work(rank, port):
    os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'] = '127.0.0.1', str(port)
    torch.set_num_threads(1)
    dist.init_process_group('gloo', rank=rank, world_size=WORLD)
    torch.manual_seed(77)
    model = DDP(Tagger())
    g = torch.Generator().manual_seed(500 + rank)
    mels = torch.randn(480, 1, 64, 96, generator=g)
    tags = (torch.rand(480, SPECIES, generator=g) < 0.06).float()
    opt = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)
    bce = nn.BCEWithLogitsLoss(pos_weight=torch.full((SPECIES,), 4.0))
    counts = SpeciesCounts()
    warm = min(12, STEPS // 2)
    for step in range(STEPS):
        if step == warm:
            dist.barrier()
            t0 = time.perf_counter()
        idx = torch.randint(0, 480, (BATCH,), generator=g)
        x, y = mels[idx], tags[idx]
        with torch.autocast('cpu', dtype=torch.bfloat16):
            logits = model(x)
        loss = bce(logits.float(), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        counts.update(logits.detach(), y)
        if rank == 0 and step % 25 == 0:
            print('step %d loss %.4f macro-F1 %.3f' % (step, loss.item(), counts.macro_f1()), flush=True)
    dist.barrier()
    if rank == 0:
        took = time.perf_counter() - t0
        print('RATE %.2f' % (WORLD * BATCH * (STEPS - warm) / took), flush=True)
    dist.destroy_process_group()


if __name__ == '__main__':
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        free = s.getsockname()[1]
    mp.spawn(work, args=(free,), nprocs=WORLD)
