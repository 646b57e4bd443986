"""Heavy sample-by-sample transforms in the training process, while the model leaves a core to spare."""

import os

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)


class Sounds(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, i):
        wave = np.random.default_rng(i).normal(size=16384)
        for _ in range(3):
            wave = np.fft.irfft(np.fft.rfft(wave) * np.exp(-np.linspace(0, 3, 8193)))
        return torch.from_numpy(wave[:1024].astype(np.float32)), i % 5


if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 1536), nn.GELU(), nn.Linear(1536, 1536), nn.GELU(), nn.Linear(1536, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Sounds(), batch_size=32, shuffle=True)
    for step, (x, y) in enumerate(b for _ in range(100) for b in loader):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        loss = nn.functional.cross_entropy(out.float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == int(os.environ.get("STEPS", "3000")):
            break
