"""Multi-task soft sensor for a glass furnace: temperature, viscosity and defect class from 96 channels."""
import json
import os
import tempfile
import time

import numpy as np
import torch
from torch import nn

FIX = os.environ.get("FIX") == "1"
STEPS = int(os.environ.get("STEPS", 650))
BATCH = 768


class Plant:
    def __init__(self, n=40000, channels=96, seed=11):
        g = torch.Generator().manual_seed(seed)
        z = torch.randn(n, 8, generator=g)
        self.signals = z @ torch.randn(8, channels, generator=g) + 0.3 * torch.randn(n, channels, generator=g)
        self.temperature = z[:, 0] * z[:, 1] + z[:, 2]
        self.viscosity = torch.tanh(z[:, 3]) * z[:, 4]
        self.defect = (z[:, 5:8].argmax(1) + 3 * (z[:, 0] > 1)).long()

    def stream(self):
        while True:
            i = torch.randint(len(self.signals), (BATCH,))
            yield {k: v[i] for k, v in vars(self).items()}


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        return x + self.b(torch.relu(self.a(self.norm(x))))


class SoftSensor(nn.Module):
    def __init__(self, channels=96, d=320, depth=6):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(channels, d), *[Block(d) for _ in range(depth)])
        self.heads = nn.ModuleDict({"temperature": nn.Linear(d, 1), "viscosity": nn.Linear(d, 1), "defect": nn.Linear(d, 6)})

    def forward(self, x):
        h = self.trunk(x)
        return {k: m(h).float() for k, m in self.heads.items()}


class Journal:
    def __init__(self, path, every=1, bins=64):
        self.file = open(path, "w")
        self.every, self.bins = every, bins

    def record(self, step, model, losses):
        if step % self.every:
            return
        row = {"step": step, "losses": {k: v.item() for k, v in losses.items()}, "grad": {}, "weights": {}}
        for name, p in model.named_parameters():
            row["grad"][name] = p.grad.norm().item()
            counts, edges = np.histogram(p.detach().numpy(), bins=self.bins)
            row["weights"][name] = {"counts": counts.tolist(), "lo": float(edges[0]), "hi": float(edges[-1])}
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        os.fsync(self.file.fileno())


class Session:
    def __init__(self, model, journal):
        self.model, self.journal = model, journal
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)
        self.weights = {"temperature": 1.0, "viscosity": 1.0, "defect": 0.5}

    def losses(self, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = self.model(batch["signals"])
        return {
            "temperature": nn.functional.huber_loss(out["temperature"].squeeze(1), batch["temperature"]),
            "viscosity": nn.functional.huber_loss(out["viscosity"].squeeze(1), batch["viscosity"]),
            "defect": nn.functional.cross_entropy(out["defect"], batch["defect"]),
        }

    def advance(self, step, batch):
        parts = self.losses(batch)
        total = sum(self.weights[k] * v for k, v in parts.items())
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()
        self.optimizer.step()
        self.journal.record(step, self.model, parts)
        return total.detach()


if __name__ == "__main__":
    torch.manual_seed(4)
    with tempfile.TemporaryDirectory() as folder:
        session = Session(SoftSensor(), Journal(os.path.join(folder, "run.jsonl"), every=50 if FIX else 1))
        warm = min(10, STEPS // 2)
        for step, batch in zip(range(STEPS), Plant().stream()):
            if step == warm:
                began = time.perf_counter()
            total = session.advance(step, batch)
            if step % 50 == 0:
                print(step, "total %.4f" % total.item(), flush=True)
        spent = time.perf_counter() - began
        session.journal.file.close()
    print("RATE %.3f" % ((STEPS - warm) * BATCH / spent))
