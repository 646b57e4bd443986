"""The memory of a traced step: what the forward pass keeps, and what it only needs for a while."""

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from perftrain.attach.operations import PHASE_SPAN, STEP_MARK, by_operation, memory_of_a_step

KEPT, SCRATCH = 4 * 300_000, 4 * 500_000


def traced() -> list:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True) as profiler:
        for _ in range(2):
            with record_function(PHASE_SPAN + "forward"):
                scratch = torch.empty(SCRATCH // 4)
                kept = torch.empty(KEPT // 4)
                del scratch
            with record_function(PHASE_SPAN + "backward"):
                x = torch.ones(64, 64)
                (x @ x).sum()
                del kept
            with record_function(STEP_MARK):
                pass
    return list(profiler.profiler.kineto_results.events())


def test_a_step_keeps_activations_and_needs_workspace() -> None:
    found = memory_of_a_step(traced())
    assert found["activations_bytes"] == KEPT
    assert found["transient_bytes"] == KEPT + SCRATCH
    assert found["workspace_bytes"] == SCRATCH
    assert [name for name, _, _ in found["phases"]] == ["forward", "backward"]
    assert max(size for _, size in found["timeline"]) == KEPT + SCRATCH
    assert all(0 <= at <= found["phases"][-1][2] + 1 for at, _ in found["timeline"])


def test_operations_are_told_by_phase_and_marks_are_none() -> None:
    found = by_operation(traced())
    rows = {(row[0], row[7]): row for row in found["operations"]}
    assert rows[("aten::mm", "backward")][4] == 2 * 2 * 64**3
    assert not any(name.startswith(PHASE_SPAN) for name, _ in rows)
    assert set(found["phase_s"]) == {"forward", "backward"}
