"""Saves a large model every few steps."""

import os
import tempfile

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(200_000, 64), nn.Flatten(), nn.Linear(64 * 8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with tempfile.TemporaryDirectory() as folder:
    for step in range(int(os.environ.get("STEPS", "1500"))):
        loss = nn.functional.cross_entropy(model(torch.randint(0, 200_000, (512, 8))), torch.randint(0, 4, (512,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            torch.save({"model": model.state_dict(), "step": step}, f"{folder}/last.pt")
