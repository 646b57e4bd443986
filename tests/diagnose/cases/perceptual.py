"""A loss in the features of a network that is not trained, whose parameters still ask for gradients."""

import os

import torch
from torch import nn

torch.manual_seed(0)
judge = nn.Sequential(*[m for i, o in ((1, 32), (32, 48), (48, 48)) for m in (nn.Conv2d(i, o, 3, padding=1), nn.ReLU())]).eval()
maker = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
optimizer = torch.optim.Adam(maker.parameters(), lr=1e-3, fused=True)
images = torch.rand(64, 1, 24, 24)
for _step in range(int(os.environ.get("STEPS", "1500"))):
    clean = images[torch.randint(0, 64, (8,))]
    with torch.autocast("cpu", torch.bfloat16):
        made = maker(clean + 0.1 * torch.randn_like(clean))
        loss = nn.functional.mse_loss(judge(made).float(), judge(clean).float())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
