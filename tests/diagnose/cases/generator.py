"""No DataLoader: a generator that waits for a slow archive."""

import os
import time

import torch
from torch import nn


def archive(batch):
    while True:
        time.sleep(0.02)  # as reading from a slow share would
        yield torch.randn(batch, 128), torch.randint(0, 3, (batch,))


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 3))
optimizer = torch.optim.Adam(model.parameters())
for step, (x, y) in enumerate(archive(64)):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == int(os.environ.get("STEPS", "2000")):
        break
