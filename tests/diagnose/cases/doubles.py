"""Data from NumPy, and so everything in float64."""

import os

import numpy as np
import torch
from torch import nn

torch.manual_seed(0)
x = torch.from_numpy(np.random.default_rng(0).normal(size=(4096, 512)))
model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(int(os.environ.get("STEPS", "400"))):
    batch = x[step % 16 * 256 : step % 16 * 256 + 256]
    loss = (model(batch).squeeze(1) - batch[:, 0]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
