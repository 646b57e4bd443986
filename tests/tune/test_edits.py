"""Switches written into a script: the copy says what the switch did, and nothing else changes."""

from __future__ import annotations

import ast

import pytest

from perftrain.tune.edits import edit_script

SCRIPT = '''"""Trains — with a dash."""
import gc
import torch
from torch import nn
from torch.utils.data import DataLoader

torch.set_num_threads(1)
torch.autograd.set_detect_anomaly(True)


class Trainer:
    def __init__(self, data):
        self.net = nn.Linear(8, 1)
        self.loader = DataLoader(
            data,
            batch_size=8,
            shuffle=True,  # „every epoch“
        )
        self.held_out = DataLoader(data, batch_size=8)
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=1e-3)

    def fit(self):
        for x in self.loader:
            self.net(x).mean().backward()
            self.opt.step()
            gc.collect()
'''


def changed(*switches: str) -> tuple[list[str], list[str]]:
    found = edit_script(SCRIPT, switches, "train.py")
    ast.parse(found.source)
    lines = [line for line in found.diff.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    return [line[1:].strip() for line in lines if line[0] == "+"], list(found.by_hand)


@pytest.mark.parametrize(
    ("switch", "written"),
    [
        ("fused", "self.opt = torch.optim.AdamW(self.net.parameters(), lr=1e-3, fused=True)"),
        ("workers=4", "shuffle=True, num_workers=4, persistent_workers=True,  # „every epoch“"),
        ("threads=2", "torch.set_num_threads(2)"),
        ("anomaly_off", "torch.autograd.set_detect_anomaly(False)"),
        ("no_gc", "pass"),
        ("amp", "self.net.forward = torch.autocast('cpu', dtype=torch.bfloat16)(self.net.forward)"),
        ("channels_last", "self.net.to(memory_format=torch.channels_last)"),
        ("compile", "self.net.compile()"),
        ("foreach", "self.opt = torch.optim.AdamW(self.net.parameters(), lr=1e-3, foreach=True)"),
        ("tf32", "torch.backends.mkldnn.matmul.fp32_precision = torch.backends.mkldnn.conv.fp32_precision = 'tf32'"),
        ("cudnn_benchmark", "torch.backends.cudnn.benchmark = True"),
    ],
)
def test_a_switch_is_written_where_it_belongs(switch: str, written: str) -> None:
    added, by_hand = changed(switch)
    assert by_hand == []
    assert any(written.split(",  #")[0].rstrip(",") in line for line in added), added


def test_several_at_once_and_what_cannot_be_written() -> None:
    added, by_hand = changed("amp", "fused", "workers=2", "checkpointing_off")
    assert len(added) >= 3
    assert by_hand == ["checkpointing_off: call the blocks directly instead of torch.utils.checkpoint.checkpoint"]


def test_an_argument_that_stands_there_is_changed() -> None:
    source = "loader = DataLoader(d, shuffle=True, num_workers=0)\n"
    assert (
        edit_script(source, ["workers=3"], "t.py").source
        == "loader = DataLoader(d, shuffle=True, num_workers=3, persistent_workers=True)\n"
    )


def test_a_setting_stands_behind_the_imports_under_the_name_that_torch_has_there() -> None:
    source = "import os\nimport torch as th\nfrom torch import nn\n\nnet = nn.Linear(1, 1)"
    found = edit_script(source, ["threads=4", "cudnn_benchmark"], "t.py").source
    assert found.splitlines()[3:5] in (
        ["th.set_num_threads(4)", "th.backends.cudnn.benchmark = True"],
        ["th.backends.cudnn.benchmark = True", "th.set_num_threads(4)"],
    )
    assert edit_script("import torch", ["threads=4"], "t.py").source == "import torch\ntorch.set_num_threads(4)\n"
    assert edit_script("from torch import nn\n", ["threads=4"], "t.py").diff == ""


def test_a_script_without_such_a_place_is_left_alone() -> None:
    found = edit_script("print('hello')\n", ["amp", "workers=2"], "t.py")
    assert found.diff == ""
    assert len(found.by_hand) == 2


def test_what_depends_on_the_device_is_written_for_the_one_it_trains_on() -> None:
    found = edit_script(SCRIPT, ["amp", "tf32"], "train.py", "cuda").source
    assert "self.net.forward = torch.autocast('cuda', dtype=torch.bfloat16)(self.net.forward)" in found
    assert "torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.conv.fp32_precision = 'tf32'" in found
