"""A small GPT as one writes it: pre-norm blocks, causal attention, learned positions."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention to what came before, then two linear layers, each added to the stream after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BLD: Tensor) -> Tensor:
        qkv = self.qkv(self.norm_1(x_BLD)).unflatten(2, (3, self.heads, -1))
        q_BHLK, k_BHLK, v_BHLK = qkv.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q_BHLK, k_BHLK, v_BHLK, is_causal=True)  # padding comes last: nobody looks at it
        x_BLD = x_BLD + self.out(seen.transpose(1, 2).flatten(2))
        return x_BLD + self.mlp(self.norm_2(x_BLD))


class GPT(nn.Module):
    """Token ids (batch, length) -> logits (batch, length, vocabulary), for up to ``longest`` positions."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, longest: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers) if name.endswith(("out.weight", "mlp.2.weight")) else 0.02)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        x_BLD = self.embedding(tokens_BL) + self.positions.weight[: tokens_BL.shape[1]]
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return self.head(self.norm(x_BLD))
