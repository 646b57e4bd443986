"""Where the memory of a step goes, what limits the batch, and whether it grows: from what was seen, in bytes."""

from __future__ import annotations

from typing import Any

from perftrain.diagnose.seen import Seen

CATEGORIES = ("weights_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "workspace_bytes", "fragmented_bytes")

LEAST_STEPS = 100
"""In fewer steps a process is still growing to its usual size."""


def memory_facts(seen: Seen) -> dict[str, Any]:
    """Bytes by category: what lives from step to step (weights, gradients, the optimizer's state), what the forward pass keeps for
    the backward pass (activations), the most above that (workspace); the process; growth per step; a step's timeline.

    ``largest_batch``: where the batch is limited by memory, extrapolated from the activations of a sample and what is free.
    """
    traced = seen.trace.get("memory") or {}
    found: dict[str, Any] = {k: traced[k] for k in CATEGORIES if traced.get(k) is not None}
    if "transient_bytes" in traced:
        found["activations_and_workspace_bytes"] = traced["transient_bytes"]
    points = seen.process.get("rss") or []
    if points:
        found["process_bytes"] = points[-1][1]
        if points[-1][0] - points[0][0] >= LEAST_STEPS:
            found["growth_bytes_per_step"] = min(seen.growth_bytes_per_step)
    found |= _largest_batch(seen, found, traced.get("free_bytes"))
    return found | {k: traced[k] for k in ("timeline", "phases") if traced.get(k)}


def _largest_batch(seen: Seen, found: dict[str, Any], free_bytes: int | None) -> dict[str, Any]:
    per_pass = seen.samples_per_step / max(1.0, seen.backwards_per_step)
    activations = found.get("activations_bytes", 0)
    if not free_bytes or per_pass < 1 or activations < 2**20:
        return {}
    per_sample = activations / per_pass
    return {"activations_bytes_per_sample": round(per_sample), "largest_batch": int(per_pass + free_bytes / per_sample)}
