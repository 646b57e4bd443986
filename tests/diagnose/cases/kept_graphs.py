"""Adds up the loss with its graph, and backpropagates all of it: a step takes longer and longer."""

import os

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
history = []
for _step in range(int(os.environ.get("STEPS", "4000"))):
    out = model(torch.randn(512, 64))
    history.append(out)
    loss = out.square().mean() + 1e-3 * torch.stack([h.detach().mean() for h in history]).var(correction=0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
