"""Peaks follow what is allocated, and fall when they are reset."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from perftrain.facts import PerftrainError
from perftrain.measure import memory
from perftrain.measure.memory import can_reset, peak_bytes, reset_peak

MB = 1_000_000


@pytest.mark.skipif(not can_reset("cpu"), reason="this system cannot reset the peak of a process")
def test_the_peak_of_a_cpu_rises_stays_and_falls_on_reset() -> None:
    reset_peak("cpu")
    before = peak_bytes("cpu")
    block = np.ones(200 * MB, dtype=np.uint8)
    risen = peak_bytes(torch.device("cpu"))
    del block
    kept = peak_bytes("cpu")
    reset_peak("cpu")
    assert risen - before == pytest.approx(200 * MB, rel=0.05)
    assert kept == pytest.approx(risen, rel=0.01)
    assert risen - peak_bytes("cpu") == pytest.approx(200 * MB, rel=0.05)


def test_children_are_not_included() -> None:
    reset_peak("cpu")
    before = peak_bytes("cpu")
    subprocess.run([sys.executable, "-c", "x = bytearray(150_000_000)"], check=True)
    assert peak_bytes("cpu") - before < 50 * MB


def test_without_proc_the_peak_is_the_accountants_and_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = peak_bytes("cpu")
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "none")
    monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path / "none" / "either")
    assert not can_reset("cpu")
    reset_peak("cpu")
    assert peak_bytes("cpu") >= 0.9 * plain


def test_other_devices_are_refused() -> None:
    with pytest.raises(PerftrainError, match="Seen: mps"):
        peak_bytes("mps")
    with pytest.raises(PerftrainError, match="Seen: meta"):
        reset_peak(torch.device("meta"))


def test_it_does_not_bring_torch_in_for_a_cpu() -> None:
    code = "import sys; from perftrain.measure.memory import peak_bytes; peak_bytes('cpu'); print('torch' in sys.modules)"
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    assert subprocess.run([sys.executable, "-c", code], env=path, capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_peak_of_a_gpu_rises_and_falls_on_reset() -> None:
    reset_peak("cuda")
    before = peak_bytes("cuda")
    block = torch.ones(200 * MB, dtype=torch.uint8, device="cuda")
    risen = peak_bytes("cuda")
    del block
    assert risen - before == pytest.approx(200 * MB, rel=0.02)
    assert peak_bytes("cuda") == risen
    reset_peak("cuda:0")
    assert peak_bytes("cuda") <= before
