"""Next-chord prediction on piano rolls: two-layer LSTM, 88 keys, windows of 64 ticks."""
import os
import random
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

STEPS = int(os.environ.get("STEPS", 240))
FIX = os.environ.get("FIX") == "1"
BATCH, TICKS, KEYS = 64, 64, 88


def compose(n_songs=40, ticks=1500, seed=3):
    rng = np.random.default_rng(seed)
    songs = []
    for _ in range(n_songs):
        roll = np.zeros((ticks, KEYS), dtype=np.uint8)
        root = 40
        for t in range(0, ticks, 4):
            root = int(np.clip(root + rng.choice([-5, -2, 0, 2, 5]), 20, 65))
            for k in (0, 4 if rng.random() < 0.6 else 3, 7, 12):
                roll[t:t + int(rng.integers(2, 6)), root + k] = 1
        songs.append(roll)
    return songs


class Windows(Dataset):
    def __init__(self, songs):
        self.songs = songs

    def __len__(self):
        return 1_000_000

    def __getitem__(self, i):
        rng = random.Random(i)
        song = self.songs[rng.randrange(len(self.songs))]
        a = rng.randrange(len(song) - TICKS - 1)
        return {"roll": song[a:a + TICKS + 1], "shift": rng.randint(-3, 3)}


def stack_songs(items):
    out = np.empty((len(items), TICKS + 1, KEYS), dtype=np.uint8)
    for row, item in zip(out, items):
        row[:] = np.roll(item["roll"], item["shift"], axis=1)
    return {"x": torch.from_numpy(out[:, :-1].copy()), "y": torch.from_numpy(out[:, 1:].copy())}


class Pianist(nn.Module):
    def __init__(self, hidden=320):
        super().__init__()
        self.inp = nn.Linear(KEYS, hidden)
        self.rnn = nn.LSTM(hidden, hidden, num_layers=2)
        self.out = nn.Linear(hidden, KEYS)

    def forward(self, roll):
        h, _ = self.rnn(torch.relu(self.inp(roll)))
        return self.out(h)


def fixed_feed(ds, pool=24):
    ready = [stack_songs([ds[i * BATCH + j] for j in range(BATCH)]) for i in range(pool)]
    while True:
        yield from ready


def main():
    torch.manual_seed(8)
    ds = Windows(compose())
    if FIX:
        feed = fixed_feed(ds)
    else:
        feed = iter(DataLoader(ds, batch_size=BATCH, shuffle=False, num_workers=1, collate_fn=stack_songs,
                               prefetch_factor=4, persistent_workers=True))
    net = Pianist()
    opt = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
    bce = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(4.0))
    warm, track = min(10, STEPS // 2), []
    for step in range(STEPS):
        if step == warm:
            t0 = time.perf_counter()
        batch = next(feed)
        x = batch["x"].transpose(0, 1).float()
        y = batch["y"].transpose(0, 1).float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = net(x)
        loss = bce(logits.float(), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        if not FIX:
            track.append(loss.item())
            if step % 30 == 0:
                print(f"[{step}] bce {np.mean(track[-30:]):.4f}", flush=True)
    print("RATE %.3f" % ((STEPS - warm) * BATCH / (time.perf_counter() - t0)))


if __name__ == "__main__":
    main()
