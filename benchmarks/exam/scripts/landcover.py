# Land cover from 4-band satellite tiles: small encoder/decoder, per-region scores while training.
import os
import time
from collections import defaultdict

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

FIX = os.environ.get('FIX') == '1'
STEPS = int(os.environ.get('STEPS', 700))
BATCH, SIZE, VOID = 12, 80, 255
CLASSES = ['water', 'forest', 'crop', 'grass', 'urban', 'bare']
REGIONS = ['north', 'delta', 'coast', 'ridge']

torch.manual_seed(5)
rng = np.random.default_rng(5)


def make_tiles(n):
    coarse = rng.integers(0, len(CLASSES), (n, 10, 10))
    label = coarse.repeat(8, 1).repeat(8, 2)
    spectrum = rng.normal(0, 1, (len(CLASSES), 4)).astype(np.float32)
    image = spectrum[label].transpose(0, 3, 1, 2) + rng.normal(0, 0.8, (n, 4, SIZE, SIZE)).astype(np.float32)
    label[rng.random(label.shape) < 0.03] = VOID
    return torch.from_numpy(image.astype(np.float32)), torch.from_numpy(label.astype(np.int64)), rng.integers(0, len(REGIONS), n)


images, labels, region_of = make_tiles(480)


def block(i, o, stride=1):
    return nn.Sequential(nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = block(4, 16)
        self.down1, self.down2 = block(16, 32, 2), block(32, 64, 2)
        self.mid = block(64, 64)
        self.up1, self.up2 = nn.Conv2d(64, 32, 1), nn.Conv2d(32, 16, 1)
        self.head = nn.Conv2d(16, len(CLASSES), 1)

    def forward(self, x):
        a = self.stem(x)
        b = self.down1(a)
        c = self.mid(self.down2(b))
        c = F.interpolate(self.up1(c), scale_factor=2.0) + b
        return self.head(F.interpolate(self.up2(c), scale_factor=2.0) + a)


class Scoreboard:
    """Counts (region, truth, guess) so that IoU can be shown per region and class."""

    def __init__(self):
        self.table = defaultdict(int)

    def add(self, regions, truth, guess):
        for r, t_tile, g_tile in zip(regions, truth.flatten(1).tolist(), guess.flatten(1).tolist()):
            region = REGIONS[r]
            for t, g in zip(t_tile, g_tile):
                if t != VOID:
                    self.table[region, CLASSES[t], CLASSES[g]] += 1

    def add_counts(self, regions, truth, guess):
        k = len(CLASSES)
        r = torch.as_tensor(regions).view(-1, 1, 1).expand_as(truth)
        keep = truth != VOID
        flat = (r * k * k + truth * k + guess)[keep]
        counts = torch.bincount(flat, minlength=len(REGIONS) * k * k).view(-1, k, k).tolist()
        for i, region in enumerate(REGIONS):
            for a in range(k):
                for b in range(k):
                    self.table[region, CLASSES[a], CLASSES[b]] += counts[i][a][b]

    def iou(self, region):
        out = []
        for c in CLASSES:
            hit = self.table[region, c, c]
            union = sum(self.table[region, c, o] + self.table[region, o, c] for o in CLASSES) - hit
            out.append(hit / union if union else 0.0)
        return sum(out) / len(out)


net = Segmenter().to(memory_format=torch.channels_last)
opt = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=1e-4, fused=True)
board = Scoreboard()
seen, start, step = 0, None, 0
while step < STEPS:
    for idx in torch.randperm(len(images)).split(BATCH):
        x = images[idx].contiguous(memory_format=torch.channels_last)
        y = labels[idx]
        with torch.autocast('cpu', torch.bfloat16):
            logits = net(x)
        loss = F.cross_entropy(logits.float(), y, ignore_index=VOID)
        opt.zero_grad()
        loss.backward()
        opt.step()
        (board.add_counts if FIX else board.add)(region_of[idx.numpy()], y, logits.detach().argmax(1))
        step += 1
        if start is not None:
            seen += len(idx)
        elif step == 10:
            start = time.time()
        if step % 60 == 0:
            print(f'{step:5d} loss {loss.item():.3f} ' + ' '.join(f'{r} {board.iou(r):.3f}' for r in REGIONS), flush=True)
        if step >= STEPS:
            break
print(f'RATE {seen / (time.time() - start):.2f}')
