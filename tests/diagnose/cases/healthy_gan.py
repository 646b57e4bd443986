"""Two optimizers that take turns; nothing to mend."""

import os

import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 784))
critic = nn.Sequential(nn.Linear(784, 1024), nn.LeakyReLU(0.2), nn.Linear(1024, 1024), nn.LeakyReLU(0.2), nn.Linear(1024, 1))
first = torch.optim.Adam(critic.parameters(), lr=2e-4, fused=True)
second = torch.optim.Adam(generator.parameters(), lr=2e-4, fused=True)
real = torch.randn(512, 784)
for _step in range(int(os.environ.get("STEPS", "600"))):
    with torch.autocast("cpu", torch.bfloat16):
        fake = generator(torch.randn(512, 128))
        loss = nn.functional.softplus(critic(fake.detach())).mean() + nn.functional.softplus(-critic(real)).mean()
    first.zero_grad()
    loss.backward()
    first.step()
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.softplus(-critic(fake)).mean()
    second.zero_grad()
    loss.backward()
    second.step()
