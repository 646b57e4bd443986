"""A convolutional network in 16 bits on tensors in channels-first order."""

import os

import torch
from torch import nn

torch.manual_seed(0)
layers, c = [], 3
for o in (48, 96, 96, 128):
    layers += [
        nn.Conv2d(c, o, 3, padding=1, bias=False),
        nn.BatchNorm2d(o),
        nn.ReLU(),
        nn.Conv2d(o, o, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]
    c = o
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, y = torch.randn(32, 3, 64, 64), torch.randint(0, 10, (32,))
for _step in range(int(os.environ.get("STEPS", "300"))):
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    loss = nn.functional.cross_entropy(out.float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
