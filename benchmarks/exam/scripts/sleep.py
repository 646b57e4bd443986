# Sleep stages (5) from two-channel EEG epochs. Objective: supervised + virtual adversarial smoothness + entropy.
import os, time
import torch
import torch.nn as nn
import torch.nn.functional as F

CFG = {
    'steps': int(os.environ.get('STEPS', 260)),
    'batch': 16,
    'points': 1920,
    'vat': {'xi': 1e-2, 'radius': 1.5},
    'weights': {'supervised': 1.0, 'smooth': 0.0, 'entropy': 0.02},   # run B of the ablation table
}
SKIP = os.environ.get('FIX', '') == '1'


class Residual(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.a = nn.Conv1d(i, o, 7, stride=2, padding=3)
        self.b = nn.Conv1d(o, o, 5, padding=2)
        self.skip = nn.Conv1d(i, o, 1, stride=2)
        self.na, self.nb = nn.GroupNorm(8, o), nn.GroupNorm(8, o)

    def forward(self, x):
        y = F.silu(self.na(self.a(x)))
        return F.silu(self.nb(self.b(y)) + self.skip(x))


class SleepNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(Residual(2, 32), Residual(32, 64), Residual(64, 96), Residual(96, 128))
        self.head = nn.Linear(128, 5)

    def forward(self, x):
        with torch.autocast('cpu', dtype=torch.bfloat16):
            return self.head(self.body(x).mean(-1)).float()


def unit(d):
    return d / (d.flatten(1).norm(dim=1).view(-1, 1, 1) + 1e-8)


def kl(p_logits, q_logits):
    p = F.log_softmax(p_logits, 1)
    return (p.exp() * (p - F.log_softmax(q_logits, 1))).sum(1).mean()


def smoothness(net, x, logits, xi, radius):
    target = logits.detach()
    d = unit(torch.randn_like(x)).requires_grad_()
    probe = kl(target, net(x + xi * d))
    g, = torch.autograd.grad(probe, d)
    return kl(target, net(x + radius * unit(g)))


def objective(net, x, y):
    w = CFG['weights']
    logits = net(x)
    terms = {'supervised': F.cross_entropy(logits, y)}
    if not SKIP or w['smooth'] > 0:
        terms['smooth'] = smoothness(net, x, logits, **CFG['vat'])
    p = F.softmax(logits, 1)
    terms['entropy'] = -(p * p.clamp(min=1e-8).log()).sum(1).mean()
    return sum(w[k] * v for k, v in terms.items()), terms


torch.manual_seed(8)
stage = torch.randint(0, 5, (500,))
t = torch.arange(CFG['points']) / 64.0
hz = torch.tensor([10.0, 6.0, 13.0, 2.0, 7.5])[stage].view(-1, 1, 1)
eeg = torch.sin(6.2832 * hz * t + torch.rand(500, 2, 1) * 6.28) + 1.5 * torch.randn(500, 2, CFG['points'])

net = SleepNet()
opt = torch.optim.AdamW(net.parameters(), lr=3e-4, weight_decay=0.02, fused=True)
warm = min(12, CFG['steps'] // 2)
for n in range(CFG['steps']):
    if n == warm:
        clock = time.perf_counter()
    pick = torch.randint(0, 500, (CFG['batch'],))
    loss, terms = objective(net, eeg[pick], stage[pick])
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    if n % 30 == 0:
        print('step %d total %.4f | ' % (n, loss.item()) + ' '.join('%s %.4f' % (k, v.item()) for k, v in terms.items()), flush=True)
clock = time.perf_counter() - clock
print('RATE %.3f' % (CFG['batch'] * (CFG['steps'] - warm) / clock))
