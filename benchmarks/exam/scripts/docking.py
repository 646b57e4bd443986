"""Binding affinity of ligand/pocket pairs; cross attention from ligand atoms to pocket residues."""
import os, time, math
import torch
from torch import nn

FIX = os.environ.get('FIX', '0') == '1'
STEPS = int(os.environ.get('STEPS', 400))
torch.manual_seed(31)

B, L_MAX, P_MAX, D, H = 24, 32, 64, 128, 4
N = 1200
atoms = torch.randint(0, 12, (N, L_MAX))
residues = torch.randint(0, 21, (N, P_MAX))
n_atoms = torch.randint(14, L_MAX + 1, (N,))
n_res = torch.randint(30, P_MAX + 1, (N,))
wa, wr = torch.randn(12), torch.randn(21)
am = torch.arange(L_MAX)[None] < n_atoms[:, None]
rm = torch.arange(P_MAX)[None] < n_res[:, None]
affinity = (wa[atoms] * am).sum(1) / n_atoms * 3 + (wr[residues] * rm).sum(1) / n_res * 3 + 0.1 * torch.randn(N)


class Cross(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.ff = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))

    def attend(self, q, k, v, nl, np_):
        out = torch.zeros_like(q)
        d = D // H
        for i, (l, p) in enumerate(zip(nl.tolist(), np_.tolist())):
            qs, ks, vs = (t.chunk(H, -1) for t in (q[i, :l], k[i, :p], v[i, :p]))
            heads = []
            for qh, kh, vh in zip(qs, ks, vs):
                score = qh @ kh.t() / math.sqrt(d)
                heads.append(score.softmax(-1) @ vh)
            out[i, :l] = torch.cat(heads, -1)
        return out

    def attend_all(self, q, k, v, nl, np_):
        q, k, v = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in (q, k, v))
        mask = (torch.arange(P_MAX)[None] < np_[:, None])[:, None, None]
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.transpose(1, 2).flatten(2)

    def forward(self, lig, poc, nl, np_):
        x = self.norm(lig)
        f = self.attend_all if FIX else self.attend
        lig = lig + self.o(f(self.q(x), self.k(poc), self.v(poc), nl, np_))
        return lig + self.ff(lig)


class Affinity(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.atom, self.res = nn.Embedding(12, D), nn.Embedding(21, D)
        self.mix = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))
        self.layers = nn.ModuleList(Cross() for _ in range(depth))
        self.head = nn.Linear(2 * D, 1)

    def forward(self, a, r, nl, np_):
        lig, poc = self.atom(a), self.res(r)
        poc = poc + self.mix(poc)
        for layer in self.layers:
            lig = layer(lig, poc, nl, np_)
        lm = (torch.arange(L_MAX)[None] < nl[:, None]).unsqueeze(-1)
        pm = (torch.arange(P_MAX)[None] < np_[:, None]).unsqueeze(-1)
        pooled = torch.cat([(lig * lm).sum(1) / nl[:, None], (poc * pm).sum(1) / np_[:, None]], -1)
        return self.head(pooled).squeeze(-1)


def batches():
    while True:
        for idx in torch.randperm(N)[:N // B * B].view(-1, B):
            yield atoms[idx], residues[idx], n_atoms[idx], n_res[idx], affinity[idx]


model = Affinity()
opt = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
count, t0, running = 0, None, 0.0
for step, (a, r, nl, np_, target) in enumerate(batches(), 1):
    loss = nn.functional.smooth_l1_loss(model(a, r, nl, np_), target)
    opt.zero_grad()
    loss.backward()
    opt.step()
    running += (loss.item() - running) / min(step, 40)
    if t0:
        count += B
    elif step == 8:
        t0 = time.time()
    if step % 25 == 0:
        print('step', step, 'loss %.4f' % running, flush=True)
    if step == STEPS:
        break
print('RATE %.2f' % (count / (time.time() - t0)))
