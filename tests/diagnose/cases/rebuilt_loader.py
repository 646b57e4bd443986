"""Each short epoch makes a loader of its own; that its workers would persist helps nobody."""

import os

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Waves(Dataset):
    def __len__(self):
        return 128

    def __getitem__(self, index):
        noise = np.random.default_rng(index).standard_normal(4000)
        return torch.tensor(np.abs(np.fft.rfft(noise))[:64], dtype=torch.float32), index % 4


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(int(os.environ.get("STEPS", "1600")) // 4):
    for x, y in DataLoader(Waves(), batch_size=32, shuffle=True, num_workers=2, persistent_workers=True):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
