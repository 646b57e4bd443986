"""A trace that somebody exported is read like a program that was watched."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, Dataset

from perftrain.diagnose.ranking import diagnose
from perftrain.diagnose.trace_file import read_trace
from perftrain.facts import Bottleneck, PerftrainError


class Slow(Dataset):
    def __len__(self) -> int:
        return 80

    def __getitem__(self, i: int) -> torch.Tensor:
        time.sleep(0.002)
        return torch.randn(8)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    plan = schedule(wait=1, warmup=1, active=6, repeat=1)
    kept = {"schedule": plan, "record_shapes": True, "on_trace_ready": lambda p: p.export_chrome_trace(str(path))}
    with profile(activities=[ProfilerActivity.CPU], **kept) as found:
        for x in DataLoader(Slow(), batch_size=8):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            found.step()
    return path


def test_phases_and_operations(trace: Path) -> None:
    seen = read_trace(trace)
    assert seen.trace["steps"] == 6
    assert 0.015 < seen.step_s < 0.06
    assert seen.share("data_wait") > 0.7
    for phase in ("forward", "backward", "optimizer"):
        assert seen.phase_s(phase) > 0, phase
    assert sum(map(seen.phase_s, seen.phases)) == pytest.approx(seen.step_s)
    assert diagnose(seen).causes[0].label is Bottleneck.INPUT_WORKERS
    assert any(o.name == "aten::addmm" and o.phase == "forward" for o in seen.operations)


def test_gzip_is_read_too(trace: Path, tmp_path: Path) -> None:
    packed = tmp_path / "trace.json.gz"
    packed.write_bytes(gzip.compress(trace.read_bytes()))
    assert read_trace(packed).step_s == read_trace(trace).step_s


def test_an_idle_device_is_seen(tmp_path: Path) -> None:
    """Made by hand: steps of 10 ms with kernels in 4 of them."""
    events = []
    for i in range(5):
        events.append({"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{i}", "tid": 1, "ts": 10_000 * i, "dur": 10_000})
        for k in range(8):
            events.append({"ph": "X", "cat": "cpu_op", "name": "aten::add", "tid": 1, "ts": 10_000 * i + 1000 * k, "dur": 500})
            events.append({"ph": "X", "cat": "kernel", "name": "add", "tid": 7, "ts": 10_000 * i + 1000 * k + 600, "dur": 500})
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = diagnose(read_trace(path))
    assert found.causes[0].label is Bottleneck.LAUNCH_OVERHEAD
    assert found.causes[0].share == pytest.approx(0.6, abs=0.01)


@pytest.mark.parametrize("content", ["nothing", "{}", '{"traceEvents": []}', '[{"ph": "X", "ts": "now", "dur": 1}]'])
def test_what_is_no_trace(tmp_path: Path, content: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(PerftrainError, match=r"trace|operations"):
        read_trace(path)
    with pytest.raises(PerftrainError, match="There is no trace"):
        read_trace(tmp_path / "none.json")
