"""Python bookkeeping for every sample of every step."""

import os

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
words = [f"word{i}" for i in range(2000)]
counts = {}
for step in range(int(os.environ.get("STEPS", "3000"))):
    x, y = torch.randn(256, 64), torch.randint(0, 10, (256,))
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for i in range(6000):
        word = words[(i * 7919 + step) % 2000]
        counts[word] = counts.get(word, 0) + len(word) % 3
