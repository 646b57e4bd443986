import os, time, argparse
import torch
from torch import nn, Tensor

"""Learning to rank web search results: 96 queries per step, 24 documents each, smooth NDCG objective."""

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=int(os.environ.get("STEPS", 320)))
ap.add_argument("--queries", type=int, default=96)
ap.add_argument("--docs", type=int, default=24)
ap.add_argument("--tau", type=float, default=0.1)
args = ap.parse_args()
FIX = os.environ.get("FIX") == "1"


def smooth_ndcg(scores: Tensor, grades: Tensor, tau: float) -> Tensor:
    total = scores.new_zeros(())
    for s, g in zip(scores, grades):
        gap = (s.unsqueeze(0) - s.unsqueeze(1)) / tau
        rank = 0.5 + torch.sigmoid(gap).sum(dim=1)
        gain = torch.pow(2.0, g) - 1.0
        dcg = (gain / torch.log2(rank + 1.0)).sum()
        best = torch.sort(gain, descending=True).values
        place = torch.arange(1, len(best) + 1, dtype=torch.float32)
        ideal = (best / torch.log2(place + 1.0)).sum()
        total = total + (1.0 - dcg / ideal.clamp(min=1e-6))
    return total / len(scores)


def smooth_ndcg_batch(scores: Tensor, grades: Tensor, tau: float) -> Tensor:
    gap = (scores.unsqueeze(1) - scores.unsqueeze(2)) / tau
    rank = 0.5 + torch.sigmoid(gap).sum(dim=2)
    gain = torch.pow(2.0, grades) - 1.0
    dcg = (gain / torch.log2(rank + 1.0)).sum(1)
    best = torch.sort(gain, dim=1, descending=True).values
    place = torch.arange(1, best.shape[1] + 1, dtype=torch.float32)
    ideal = (best / torch.log2(place + 1.0)).sum(1)
    return (1.0 - dcg / ideal.clamp(min=1e-6)).mean()


class Scorer(nn.Module):
    def __init__(self, features=220, width=640):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(features, width), nn.GELU(),
                                 nn.Linear(width, width), nn.GELU(),
                                 nn.Linear(width, width), nn.GELU(),
                                 nn.Linear(width, 1))

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.net(x).squeeze(-1).float()


def main():
    torch.manual_seed(2024)
    pool_x = torch.randn(1500, args.docs, 220)
    truth = torch.randn(220) / 220 ** 0.5
    pool_g = ((pool_x @ truth) * 1.3 + 1.0).round().clamp(0, 4)
    objective = smooth_ndcg_batch if FIX else smooth_ndcg

    scorer = Scorer()
    opt = torch.optim.AdamW(scorer.parameters(), lr=4e-4, fused=True)
    warm = min(15, args.steps // 2)
    begin = 0.0
    for step in range(args.steps):
        if step == warm:
            begin = time.perf_counter()
        q = torch.randint(0, len(pool_x), (args.queries,))
        loss = objective(scorer(pool_x[q]), pool_g[q], args.tau)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 40 == 0:
            print(f"[{step}] 1-ndcg {loss.item():.4f}", flush=True)
    print("RATE %.2f" % (args.queries * (args.steps - warm) / (time.perf_counter() - begin)))


if __name__ == "__main__":
    main()
