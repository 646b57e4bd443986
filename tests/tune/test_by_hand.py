"""The line that somebody would edit for a switch that cannot be put in from outside."""

import pytest

from perftrain.opt import all_switches
from perftrain.tune.by_hand import place_in

SCRIPT = """
import torch
from torch.utils.data import DataLoader

def train(model, data):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=8)
    for x in loader:
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("switch", "line"),
    [("decode_cache", 7), ("nodes", 7), ("checkpointing", 6), ("low_memory_optimizer", 6), ("accumulation", 10), ("ema", 10)],
)
def test_the_place_of_the_switch_names_the_line(switch: str, line: int) -> None:
    found = place_in(SCRIPT, all_switches()[switch].card)
    assert found == (line, SCRIPT.splitlines()[line - 1].strip())


def test_a_script_without_such_a_line_has_no_place() -> None:
    assert place_in("print(1)", all_switches()["nodes"].card) is None
    assert place_in("this is no Python", all_switches()["nodes"].card) is None
