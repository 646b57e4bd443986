"""Only the head is trained, but gradients are computed for the whole backbone."""

import os

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(768, 768), nn.GELU())])
        self.head = nn.Linear(768, 10)

    def forward(self, x):
        return self.head(self.backbone(x))


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.Adam(model.head.parameters(), lr=1e-3)
for _step in range(int(os.environ.get("STEPS", "800"))):
    with torch.autocast("cpu", torch.bfloat16):
        out = model(torch.randn(256, 768))
    loss = nn.functional.cross_entropy(out.float(), torch.randint(0, 10, (256,)))
    model.zero_grad()
    loss.backward()
    optimizer.step()
