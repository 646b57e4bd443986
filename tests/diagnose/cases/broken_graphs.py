"""Compiled, but the forward pass reads numbers back in every block."""

import os

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(64)), nn.Parameter(torch.zeros(64))

    def forward(self, x):
        h = torch.sin(x * self.scale + self.shift)
        if h.abs().max().item() > 1e6:
            print("diverged")
        return x + torch.tanh(h) * torch.sigmoid(h)


torch.manual_seed(0)
net = nn.Sequential(*[Block() for _ in range(8)])
model = torch.compile(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for _step in range(int(os.environ.get("STEPS", "2000"))):
    loss = model(torch.randn(2048, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
