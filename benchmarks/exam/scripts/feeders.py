"""Load of the next six hours for electricity feeders, from two days of readings."""
import os
import sys
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

FIX = os.environ.get("FIX") == "1"
STEPS = int(os.environ.get("STEPS", 130))
PAST, AHEAD, FEATURES = 48, 6, 12
BATCH = 128


class Feeders(Dataset):
    def __init__(self, feeders=40, hours=3000, seed=9):
        rng = np.random.default_rng(seed)
        h = np.arange(hours)
        day = np.sin(2 * np.pi * (h[None] / 24 + rng.random((feeders, 1))))
        week = np.cos(2 * np.pi * (h[None] / 168 + rng.random((feeders, 1))))
        noise = rng.normal(0, 0.2, (feeders, hours)).cumsum(1) * 0.05
        load = 1.5 * day + 0.5 * week + noise
        extra = rng.normal(0, 1, (feeders, hours, FEATURES - 1))
        self.table = torch.from_numpy(np.concatenate([load[..., None], extra], -1)).float()
        self.spans = hours - PAST - AHEAD

    def __len__(self):
        return self.table.size(0) * self.spans

    def __getitem__(self, k):
        f, t = divmod(k, self.spans)
        w = self.table[f, t:t + PAST + AHEAD]
        return {"id": f, "past": w[:PAST], "future": w[PAST:, 0]}


class Forecaster(nn.Module):
    def __init__(self, feeders, hidden=384):
        super().__init__()
        self.who = nn.Embedding(feeders, 20)
        self.rnn = nn.LSTM(FEATURES + 20, hidden, num_layers=2, batch_first=True)
        self.head = nn.Linear(hidden, AHEAD)

    def forward(self, who, past):
        e = self.who(who).unsqueeze(1).expand(-1, past.size(1), -1)
        y, _ = self.rnn(torch.cat([past, e], -1))
        return self.head(y[:, -1])


def main():
    torch.manual_seed(30)
    data = Feeders()
    workers = dict(num_workers=1, persistent_workers=True, prefetch_factor=4) if FIX else dict(num_workers=0)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True, **workers)
    net = Forecaster(data.table.size(0))
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=FIX)
    criterion = nn.SmoothL1Loss()
    history, began = [], None
    for step, batch in enumerate(loader):
        if step == 8:
            began = time.perf_counter()
        if step == STEPS:
            break
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16):
            forecast = net(batch["id"], batch["past"])
        loss = criterion(forecast.float(), batch["future"])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        opt.step()
        if not FIX or step % 10 == 0:
            history.append(loss.item())
            sys.stdout.write(f"step {step} loss {history[-1]:.4f} grad {norm.item():.3f}\n")
            sys.stdout.flush()
    rate = BATCH * (STEPS - 8) / (time.perf_counter() - began)
    print(f"mean of the last ten {np.mean(history[-10:]):.4f}")
    print(f"RATE {rate:.2f}")


if __name__ == "__main__":
    main()
