"""Reads a number back from every parameter in every step."""

import os

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*[m for _ in range(60) for m in (nn.Linear(32, 32), nn.ReLU())])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
history = []
for _step in range(int(os.environ.get("STEPS", "3000"))):
    loss = model(torch.randn(64, 32)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for name, p in model.named_parameters():
        history.append((name, p.grad.norm().item(), p.grad.abs().max().item(), p.std().item(), p.grad.isnan().any().item()))
    optimizer.step()
