"""Sorts server log lines into incident types; hashed character n-grams into an embedding bag."""
import os
import random
import time
from zlib import crc32

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

FIX = os.environ.get('FIX') == '1'
STEPS = int(os.environ.get('STEPS', 850))
BUCKETS, KINDS = 1 << 14, 12
PARTS = ['kernel', 'sshd', 'nginx', 'postgres', 'cron', 'dhcpd', 'smartd', 'docker', 'etcd', 'kubelet']
WORDS = ['timeout', 'refused', 'reset', 'segfault', 'overflow', 'denied', 'expired', 'retry', 'corrupt', 'missing', 'late', 'full']


def make_lines(n, seed=8):
    r = random.Random(seed)
    for _ in range(n):
        kind = r.randrange(KINDS)
        words = [r.choice(WORDS) for _ in range(2)] + [WORDS[kind]] * 2
        r.shuffle(words)
        yield (f'{r.choice(PARTS)}[{r.randrange(9999)}]: {words[0]} {words[1]} at 0x{r.getrandbits(32):08x} '
               f'from 10.{r.randrange(256)}.{r.randrange(256)}.{r.randrange(256)} {words[2]} {words[3]} code={r.randrange(500)}'), kind


def ngrams(line):
    text = f'<{line.lower()}>'.encode()
    return [crc32(text[i:i + k]) % BUCKETS for k in (3, 4, 5) for i in range(len(text) - k + 1)]


class Bagger:
    def __init__(self, features):
        self.features = features

    def __call__(self, rows):
        bags, kinds = zip(*((self.features(line), kind) for line, kind in rows))
        sizes = torch.tensor([0] + [len(b) for b in bags[:-1]])
        ids = torch.cat([torch.as_tensor(b) for b in bags])
        return ids, sizes.cumsum(0), torch.tensor(kinds)


class Triage(nn.Module):
    def __init__(self, dim=48, hidden=256):
        super().__init__()
        self.bag = nn.EmbeddingBag(BUCKETS, dim, mode='mean')
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, KINDS))

    def forward(self, ids, offsets):
        return self.mlp(self.bag(ids, offsets))


if __name__ == '__main__':
    torch.manual_seed(6)
    rows = list(make_lines(6000))
    if FIX:
        rows = [(torch.tensor(ngrams(line)), kind) for line, kind in rows]
        collate = Bagger(lambda f: f)
    else:
        collate = Bagger(ngrams)
    loader = DataLoader(rows, batch_size=192, shuffle=True, drop_last=True, collate_fn=collate)
    net = Triage()
    opt = torch.optim.Adam(net.parameters(), lr=2e-3, fused=True)
    step, seen, t0, level = 0, 0, None, 2.5
    while step < STEPS:
        for ids, offsets, kinds in loader:
            loss = F.cross_entropy(net(ids, offsets), kinds)
            opt.zero_grad()
            loss.backward()
            opt.step()
            level = 0.95 * level + 0.05 * loss.item()
            step += 1
            if t0 is not None:
                seen += len(kinds)
            elif step == 15:
                t0 = time.time()
            if step % 100 == 0:
                print('step %d loss %.4f' % (step, level), flush=True)
            if step >= STEPS:
                break
    print('RATE %.1f' % (seen / (time.time() - t0)))
