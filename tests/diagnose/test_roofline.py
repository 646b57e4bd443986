"""How near a step comes to the machine's peaks, and what limits the batch: from made-up records with known answers."""

import pytest

from perftrain.diagnose.memory import memory_facts
from perftrain.diagnose.roofline import roofline, roofline_line
from perftrain.diagnose.seen import Seen

PEAKS = {"matmul": {"float32": {"amount": 100e9, "seconds": 1.0}, "bfloat16": {"amount": 600e9, "seconds": 1.0}},
         "copy": {"memory": {"amount": 20e9, "seconds": 1.0}}}  # fmt: skip


def seen(dtype: str = "float", flop: float = 10e9, peaks: dict | None = None, memory: dict | None = None) -> Seen:
    """Ten steps of 0.1 s, half forward and half backward; two of them traced, with ``flop`` each."""
    row = [0.0, 1, 1, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05]
    operations = [["aten::mm", dtype, 2, 0.1, flop, 0, 0.0, "forward", 3e6], ["aten::mm", dtype, 2, 0.1, flop, 0, 0.0, "backward", 1e6]]
    process = {
        "pid": 1, "rows": [row] * 10, "traced": [], "phases": ["forward", "backward"], "counts": {}, "sums": {}, "before": [{}, {}, 0],
        "fetching": {"batches": 10, "samples": 320}, "rss": [],
        "trace": {"steps": 2, "wall_s": 0.2, "operations": operations, "memory": memory or {}},
    }  # fmt: skip
    return Seen(process, peaks=PEAKS if peaks is None else peaks)


def test_utilization_is_flop_over_time_over_peak() -> None:
    found = roofline(seen(flop=9e9))
    assert found["flop"] == 9e9
    assert found["bytes"] == 2e6
    assert found["seconds"] == pytest.approx(0.1)
    assert found["mfu"] == pytest.approx(0.9)
    assert roofline(seen(flop=5e9))["mfu"] == pytest.approx(0.5)
    assert "50% of what this machine's products reach in float32 (100" in roofline_line(seen(flop=5e9))


def test_the_peak_is_that_of_the_type_in_use() -> None:
    assert roofline(seen("c10::BFloat16", flop=6e9))["mfu"] == pytest.approx(0.1)


def test_more_than_the_peak_is_a_measuring_error_and_no_figure() -> None:
    assert roofline(seen(flop=20e9))["mfu"] is None
    assert roofline_line(seen(flop=20e9)) == ""
    assert roofline(seen(peaks={})) == {}


def test_room_for_the_batch_follows_from_a_samples_activations() -> None:
    found = memory_facts(seen(memory={"activations_bytes": 64 * 2**20, "free_bytes": 2**30, "weights_bytes": 5}))
    assert found["activations_bytes_per_sample"] == 2 * 2**20
    assert found["largest_batch"] == 32 + 512
    assert found["weights_bytes"] == 5
    assert "largest_batch" not in memory_facts(seen(memory={"activations_bytes": 64 * 2**20}))
