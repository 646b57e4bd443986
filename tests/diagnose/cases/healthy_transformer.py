"""Nothing to mend: large products in 16 bits, a fused optimizer, data at hand."""

import os

import torch
from torch import nn

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True, activation="gelu")
model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
x = torch.randn(16, 128, 512)
for _step in range(int(os.environ.get("STEPS", "200"))):
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    loss = out.float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
