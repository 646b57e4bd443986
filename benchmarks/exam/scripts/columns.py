"""Emulates the radiation scheme of a climate model column by column with a wide residual MLP."""
import os
import time
from types import SimpleNamespace

import torch
import torch.nn as nn

FIX = os.environ.get('FIX') == '1'
opts = SimpleNamespace(steps=int(os.environ.get('STEPS', 150)), batch=2048, inputs=240, outputs=60, width=1536, depth=4,
                       lr=0.02, average_every=20, check_every=50)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.lin = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.relu(self.lin(x))


class Emulator(nn.Module):
    def __init__(self, o):
        super().__init__()
        self.inp = nn.Linear(o.inputs, o.width)
        self.body = nn.ModuleList([Block(o.width) for _ in range(o.depth)])
        self.out = nn.Linear(o.width, o.outputs)

    def forward(self, x):
        x = torch.relu(self.inp(x))
        for b in self.body:
            x = b(x)
        return self.out(x)


def make_columns(o, n=30000):
    g = torch.Generator().manual_seed(99)
    x = torch.randn(n, o.inputs, generator=g)
    mix = torch.randn(o.inputs, o.outputs, generator=g) / o.inputs ** 0.5
    y = torch.tanh(x @ mix) + 0.3 * (x[:, :o.outputs] * x[:, o.outputs:2 * o.outputs])
    return x, y


def shuffled(x, y, size):
    while True:
        order = torch.randperm(len(x)).tolist()
        for at in range(0, len(x) - size + 1, size):
            rows = order[at:at + size]
            yield x[rows], y[rows]


class Smoothed:
    """Slow copy of the weights, for the check."""

    def __init__(self, net, decay=0.9):
        self.values = {k: v.detach().clone() for k, v in net.named_parameters()}
        self.decay = decay

    @torch.no_grad()
    def pull(self, net):
        for k, v in net.named_parameters():
            self.values[k] = self.decay * self.values[k] + (1 - self.decay) * v


def train(o):
    torch.manual_seed(23)
    x, y = make_columns(o)
    x_check, y_check, x, y = x[:1024], y[:1024], x[1024:], y[1024:]
    net = Emulator(o)
    for b in net.body:
        nn.init.normal_(b.lin.weight, std=0.01)
    slow = Smoothed(net)
    opt = torch.optim.SGD(net.parameters(), lr=o.lr, momentum=0.9)
    history, done, t0 = [], 0, None
    for step, (xb, yb) in enumerate(shuffled(x, y, o.batch), 1):
        with torch.autocast('cpu', dtype=torch.bfloat16):
            pred = net(xb)
        err = pred.float() - yb
        loss = err.square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if not FIX:
            history.append((loss.item(), err.detach().abs().max().item(), err.detach().mean(0).tolist()))
            if step % o.average_every == 0:
                slow.pull(net)
        if not FIX and step % o.check_every == 0:
            with torch.no_grad(), torch.autocast('cpu', dtype=torch.bfloat16):
                mse = (torch.func.functional_call(net, slow.values, x_check).float() - y_check).square().mean().item()
            print(f'step {step} train {loss.item():.4f} check {mse:.4f} worst {max(h[1] for h in history[-50:]):.2f}', flush=True)
        if t0 is not None:
            done += o.batch
        elif step == 6:
            t0 = time.perf_counter()
        if step >= o.steps:
            break
    return done / (time.perf_counter() - t0)


print('RATE %.1f' % train(opts))
