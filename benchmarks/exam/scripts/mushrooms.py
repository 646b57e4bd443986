"""Mushroom photos, 14 genera; files on disk, augmentation, VGG-style network."""
import argparse
import os
import pathlib
import tempfile
import time

import numpy as np
import torch
import torch.nn as nn
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms as T

FIX = os.environ.get("FIX") == "1"
GENERA = 14


def photograph(root, per_genus=20, seed=4):
    rng = np.random.default_rng(seed)
    for g in range(GENERA):
        folder = pathlib.Path(root, f"genus_{g:02d}")
        folder.mkdir()
        tint = rng.uniform(40, 200, 3)
        for k in range(per_genus):
            coarse = np.clip(tint + rng.normal(0, 45, (12, 12, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(coarse).resize((176, 144), Image.BICUBIC).save(folder / f"{k:03d}.jpg", quality=88)


class Accumulator:
    def __init__(self):
        self.loss = self.correct = self.n = 0

    def add(self, loss, logits, y):
        self.loss += loss.item() * len(y)
        self.correct += (logits.argmax(1) == y).sum().item()
        self.n += len(y)

    def __str__(self):
        return f"loss {self.loss / self.n:.4f} acc {self.correct / self.n:.3f} ({self.n} photos)"


def endless(loader):
    while True:
        yield from loader


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=int(os.environ.get("STEPS", 110)))
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--workers", type=int, default=4 if FIX else 1)
    ap.add_argument("--clip", type=float, default=1.0)
    a = ap.parse_args()
    torch.manual_seed(19)
    with tempfile.TemporaryDirectory() as root:
        photograph(root)
        augment = T.Compose([T.RandomResizedCrop(96, scale=(0.4, 1.0)), T.RandomHorizontalFlip(), T.ToTensor(),
                             T.Normalize([0.45, 0.45, 0.4], [0.25, 0.25, 0.25])])
        loader = DataLoader(datasets.ImageFolder(root, augment), batch_size=a.batch, shuffle=True, drop_last=True,
                            num_workers=a.workers, persistent_workers=True, pin_memory=False)
        net = nn.Sequential(models.vgg11(weights=None).features, nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                            nn.Dropout(0.3), nn.Linear(512, GENERA)).to(memory_format=torch.channels_last)
        opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4, fused=True)
        criterion = nn.CrossEntropyLoss()
        stats, batches = Accumulator(), endless(loader)
        for step in range(a.steps):
            if step == 8:
                since = time.perf_counter()
            x, y = next(batches)
            x = x.to(memory_format=torch.channels_last)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = net(x)
                loss = criterion(logits, y)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), a.clip)
            opt.step()
            stats.add(loss.detach(), logits.detach(), y)
            if step % 5 == 4:
                print(f"step {step + 1} {stats}", flush=True)
        rate = a.batch * (a.steps - 8) / (time.perf_counter() - since)
    print(f"RATE {rate:.2f}")


if __name__ == "__main__":
    main()
