"""A confusion table that Python counts pixel by pixel, in a loop that ends between two lines."""

import os
from collections import defaultdict

import torch
from torch import nn

table = defaultdict(int)


def count(truth, guess):
    for t, g in zip(truth.flatten().tolist(), guess.flatten().tolist(), strict=True):
        if t != 5:
            table["truth", t, "guess", g] += 1


torch.manual_seed(0)
model = nn.Conv2d(3, 5, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
images, truths = torch.randn(64, 3, 64, 64), torch.randint(0, 6, (64, 64, 64))
for step in range(int(os.environ.get("STEPS", "2000"))):
    image, truth = images[step % 56 :][:8], truths[step % 56 :][:8]
    guess = model(image)
    loss = nn.functional.cross_entropy(guess, truth, ignore_index=5)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    count(truth, guess[:, 1] > guess[:, 0])
