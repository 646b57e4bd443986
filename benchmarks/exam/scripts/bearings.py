"""Condition monitoring: type of bearing damage from vibration spectrograms."""
import copy
import os
import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

FIX = os.environ.get("FIX") == "1"


@dataclass
class Settings:
    steps: int = int(os.environ.get("STEPS", 280))
    batch: int = 64
    lr: float = 2e-3
    classes: int = 6
    seed: int = 3


class Spectrograms:
    """Harmonics at a damage-specific spacing over coloured noise."""

    def __init__(self, n, classes, seed):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, classes, (n,), generator=g)
        rows = torch.arange(48.0).view(1, 48, 1)
        spacing = (5.0 + 1.5 * self.y.float()).view(-1, 1, 1)
        speed = 1 + 0.1 * torch.rand(n, 1, 48, generator=g)
        self.x = torch.cos(2 * torch.pi * rows / (spacing * speed)).unsqueeze(1)
        self.x += 3.0 * torch.randn(n, 1, 48, 48, generator=g)

    def __len__(self):
        return len(self.y)

    def epochs(self, batch, seed):
        g = torch.Generator().manual_seed(seed)
        while True:
            for rows in torch.randperm(len(self), generator=g).split(batch):
                if len(rows) == batch:
                    yield self.x[rows], self.y[rows]

    def once(self, batch):
        return zip(self.x.split(batch), self.y.split(batch))


class Callback:
    def on_start(self, trainer): ...
    def on_step_end(self, trainer): ...
    def on_finish(self, trainer): ...


class Progress(Callback):
    def __init__(self, every=60):
        self.every = every

    def on_step_end(self, trainer):
        if trainer.step % self.every == 0:
            print(f"step {trainer.step:4d} loss {trainer.loss.item():.4f} best {trainer.best:.3f}", flush=True)


class Stopwatch(Callback):
    def __init__(self, skip):
        self.skip = skip

    def on_step_end(self, trainer):
        if trainer.step == self.skip:
            self.begin = time.perf_counter()
        self.end = time.perf_counter()

    def on_finish(self, trainer):
        n = (trainer.step - self.skip) * trainer.cfg.batch
        print(f"RATE {n / (self.end - self.begin):.2f}")


class KeepBest(Callback):
    """Remembers the weights with the best macro recall."""

    def __init__(self, data, classes, interval):
        self.data, self.classes, self.interval = data, classes, interval
        self.weights = None

    def on_start(self, trainer):
        trainer.best = 0.0

    @torch.no_grad()
    def recall(self, net):
        hits = torch.zeros(self.classes)
        total = torch.zeros(self.classes)
        net.eval()
        for x, y in self.data.once(128):
            with torch.autocast("cpu", torch.bfloat16):
                guess = net(x.contiguous(memory_format=torch.channels_last)).argmax(1)
            total += torch.bincount(y, minlength=self.classes)
            hits += torch.bincount(y[guess == y], minlength=self.classes)
        net.train()
        return (hits / total.clamp(min=1)).mean().item()

    def on_step_end(self, trainer):
        if trainer.step % self.interval:
            return
        score = self.recall(trainer.net)
        if score > trainer.best:
            trainer.best = score
            self.weights = copy.deepcopy(trainer.net.state_dict())


class Trainer:
    def __init__(self, net, cfg, callbacks):
        self.net, self.cfg, self.callbacks = net, cfg, callbacks
        self.opt = torch.optim.SGD(net.parameters(), lr=cfg.lr, momentum=0.9, nesterov=True, fused=True)
        self.step, self.best = 0, 0.0

    def fire(self, event):
        for c in self.callbacks:
            getattr(c, event)(self)

    def fit(self, data):
        self.net.train()
        self.fire("on_start")
        for x, y in data.epochs(self.cfg.batch, self.cfg.seed):
            x = x.contiguous(memory_format=torch.channels_last)
            with torch.autocast("cpu", torch.bfloat16):
                self.loss = F.cross_entropy(self.net(x), y)
            self.opt.zero_grad()
            self.loss.backward()
            self.opt.step()
            self.step += 1
            self.fire("on_step_end")
            if self.step >= self.cfg.steps:
                break
        self.fire("on_finish")


def unit(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True), nn.MaxPool2d(2))


if __name__ == "__main__":
    cfg = Settings()
    torch.manual_seed(cfg.seed)
    train, holdout = Spectrograms(5120, cfg.classes, 21), Spectrograms(2048, cfg.classes, 22)
    net = nn.Sequential(unit(1, 32), unit(32, 64), unit(64, 128), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, cfg.classes))
    net = net.to(memory_format=torch.channels_last)
    Trainer(net, cfg, [
        KeepBest(holdout, cfg.classes, interval=len(train) // cfg.batch * 3 if FIX else 8),
        Progress(),
        Stopwatch(skip=15),
    ]).fit(train)
