"""Galaxy morphology from survey cutouts. Wide plain ConvNet, galaxies turned and flipped at random."""
import copy
import io
import os
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

FIX = os.environ.get('FIX') == '1'
STEPS = int(os.environ.get('STEPS', 300))
KINDS = ['elliptical', 'spiral', 'barred', 'edge-on', 'irregular']


class Cutouts(Dataset):
    def __init__(self, n=960, size=32):
        rng = np.random.default_rng(40)
        yy, xx = np.mgrid[-1:1:size * 1j, -1:1:size * 1j]
        self.kind = rng.integers(0, len(KINDS), n)
        self.images = np.empty((n, 3, size, size), np.float32)
        for i, k in enumerate(self.kind):
            r2 = xx ** 2 * (1 + k) + yy ** 2
            glow = np.exp(-4 * r2) * (1 + 0.3 * np.sin(3 * k * np.arctan2(yy, xx) + 8 * r2))
            self.images[i] = glow[None] + rng.normal(0, 0.15, (3, size, size))

    def __len__(self):
        return len(self.kind)

    def __getitem__(self, i):
        x = self.images[i]
        if not FIX:
            x = np.rot90(x, np.random.randint(4), axes=(1, 2))
            if np.random.rand() < 0.5:
                x = x[:, :, ::-1]
            x = x * np.float32(np.random.uniform(0.9, 1.1))
        return torch.from_numpy(np.ascontiguousarray(x)), int(self.kind[i])


def layers(width):
    yield nn.Conv2d(3, width // 2, 3, stride=2, padding=1)
    yield nn.ReLU(inplace=True)
    yield nn.Conv2d(width // 2, width, 3, padding=1)
    yield nn.ReLU(inplace=True)
    for _ in range(3):
        yield nn.Conv2d(width, width, 3, padding=1)
        yield nn.ReLU(inplace=True)
    yield nn.AdaptiveAvgPool2d(1)
    yield nn.Flatten()
    yield nn.Linear(width, len(KINDS))


class Diary(list):
    def note(self, **kw):
        self.append({k: round(float(v), 5) for k, v in kw.items()})


torch.manual_seed(11)
np.random.seed(11)
net = nn.Sequential(*layers(256)).to(memory_format=torch.channels_last)
for m in net:
    if isinstance(m, nn.Conv2d):
        nn.init.kaiming_normal_(m.weight)
        nn.init.zeros_(m.bias)
opt = torch.optim.SGD(net.parameters(), lr=0.004, momentum=0.9, weight_decay=1e-4)
loader = DataLoader(Cutouts(), batch_size=32, shuffle=True, drop_last=True, num_workers=0)
diary, best, spare = Diary(), float('inf'), None
step, seen, t0 = 0, 0, None
while step < STEPS:
    for x, y in loader:
        x = x.to(memory_format=torch.channels_last)
        with torch.autocast('cpu', dtype=torch.bfloat16):
            out = net(x)
        loss = F.cross_entropy(out.float(), y)
        opt.zero_grad()
        loss.backward()
        gnorm = nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        opt.step()
        step += 1
        if not FIX or step % 30 == 0:
            hit = (out.argmax(1) == y).float().mean()
            diary.note(loss=loss.item(), hit=hit.item(), norm=gnorm.item(), lr=opt.param_groups[0]['lr'])
        if t0 is not None:
            seen += len(y)
        elif step == 6:
            t0 = time.time()
        if step % 30 == 0:
            recent = sum(d['loss'] for d in diary[-30:]) / len(diary[-30:])
            if recent < best and not FIX:
                best, spare = recent, copy.deepcopy(net.state_dict())
                torch.save(spare, io.BytesIO())
            print(f'step {step} loss {recent:.4f} hit {diary[-1]["hit"]:.2f}', flush=True)
        if step >= STEPS:
            break
print(f'RATE {seen / (time.time() - t0):.2f}')
