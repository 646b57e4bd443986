"""What a profiler of NVIDIA is told by a watched program, with stand-ins for torch's calls to it: there is no CUDA device here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perftrain.attach.clock import Clock
from perftrain.attach.nvtx import Ranges


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append("record"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append("stop"))
    for name in ("range_push", "range_pop", "mark"):
        monkeypatch.setattr(torch.cuda.nvtx, name, lambda *text, name=name: calls.append(" ".join((name, *text))))
    return calls


def test_so_many_steps_are_recorded_with_a_range_for_each_phase(told: list[str]) -> None:
    session: Any = SimpleNamespace(clock=Clock(), orders=SimpleNamespace(profiled_steps=2))
    ranges, clock = Ranges(session), session.clock
    clock.enter("data_wait")
    ranges.start()
    clock.leave()  # began before the recording
    for _ in range(2):
        clock.enter("forward")
        clock.leave()
        clock.end_step()
        ranges.step_done()
    clock.enter("forward")
    step = ["range_push perftrain::forward", "range_pop", "mark perftrain::end of step"]
    assert told == ["wait", "record", "mark perftrain::end of step", *step, *step, "wait", "stop"]
    assert not ranges.running
    assert ranges.taken
