"""A script whose ranks torchrun starts: all are seen, and ending them early is no failure to the agent that watches over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from perftrain.attach.launch import folder_of, watch
from perftrain.attach.orders import Orders
from perftrain.diagnose.seen import Seen
from tests.ranks import free_port

SCRIPT = """
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
torch.set_num_threads(1)
model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10**9):
    loss = model(torch.randn(32, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.distributed
def test_ranks_under_torchrun(tmp_path: Path, capfd: Any) -> None:
    path = tmp_path / "ddp.py"
    path.write_text(SCRIPT)
    program = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()), str(path))
    started: list[psutil.Process] = []

    def look(steps: int, seconds: float) -> None:
        started.extend(c for c in psutil.Process().children(recursive=True) if c not in started)

    found = watch(program, Orders(observe_s=1.0, least_steps=20, most_s=6.0, trace=False), look, 90)
    said = capfd.readouterr().err
    assert found.ended_early
    assert found.code == 0
    assert "Error" not in said
    assert "Signal" not in said, said
    assert [p["rank"] for p in found.processes] == [0, 1]
    seen = Seen(found.processes[0], others=found.processes[1:], folder=folder_of(program))
    assert {"forward", "backward", "optimizer"} <= set(seen.phases)
    assert folder_of(program) == str(tmp_path)
    assert len(started) >= 3  # the agent and both ranks
    _, alive = psutil.wait_procs(started, timeout=5)
    assert alive == []
