"""Sixteen threads, whatever the machine has."""

import os

import torch
from torch import nn

torch.set_num_threads(16)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _step in range(int(os.environ.get("STEPS", "3000"))):
    with torch.autocast("cpu", torch.bfloat16):
        out = model(torch.randn(512, 256))
    loss = out.float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
