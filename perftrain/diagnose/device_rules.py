"""Rules on a device's own timeline: why it was idle, copies, exchanges, layouts, and what its kernels reached.

That a device is busy says nothing about how well it is used: no rule here calls a program healthy for it.
"""

from __future__ import annotations

from collections.abc import Iterator

from perftrain.diagnose.finding import NOTABLE, bound, by_edit, by_switch, cause, milliseconds
from perftrain.diagnose.rules import precision_factor
from perftrain.diagnose.seen import Seen
from perftrain.facts import Bottleneck, Cause, Try

SHORT_CALL_S = 50e-6
"""An exchange shorter than this is latency, not bytes."""


def device_causes(seen: Seen) -> Iterator[Cause]:
    if "class_s" not in seen.trace:
        return
    rules = (_launching, _drained, _between, _upload, _communication, _layout, _precision, _memory_bound, _small_kernels)
    for rule in rules:
        found = rule(seen)
        if found is not None and found.upper_bound >= NOTABLE:
            yield found


def _part(seen: Seen, seconds: float) -> float:
    return seconds / max(1e-12, seen.trace.get("wall_s") or 0.0)


def _a_step(seen: Seen, calls: float) -> str:
    return f"{calls / max(1, seen.trace.get('steps') or 1):,.3g} a step"


def _idle(seen: Seen, kind: str) -> float:
    return _part(seen, (seen.trace.get("idle_s") or {}).get(kind, 0.0))


def idle_for_data(seen: Seen) -> float | None:
    """Part of the time that the device was idle while a batch was missing; None where no timeline of a device is known."""
    return _idle(seen, "data_wait") if "idle_s" in seen.trace else None


# --- an idle device ---
def _launching(seen: Seen) -> Cause | None:
    idle = _idle(seen, "launching")
    calls, seconds, tiny = (sum(row[i] for row in seen.trace["kernels"]) for i in (2, 3, 4))
    number = seen.trace["device_calls"]
    gaps_s, usual_s = seen.trace.get("short_gap_s", 0.0), seen.trace.get("usual_gap_s", 0.0)
    lines = [
        f"the device is idle for {idle:.0%} of the step while no batch is missing; kernels and copies: {_a_step(seen, number)}",
        f"a kernel takes {1e6 * seconds / calls:,.1f} us on average, {tiny / calls:.0%} of them less than 10 us" if calls else "",
        f"{_part(seen, gaps_s):.0%} of the step are gaps between launches, {1e6 * usual_s:,.0f} us as a rule" if gaps_s else "",
    ]
    if gaps_s < 0.5 * idle * seen.trace["wall_s"]:
        edit = "move what Python does inside the step out of it; perftrain diagnose train.py names the lines"
        return cause(Bottleneck.HOST_PYTHON, idle, bound(idle), 0.5, lines, "", [_freed(edit, idle)])
    tries = [by_switch("compile", 1.0, bound(idle), "fused kernels are fewer"),
             by_switch("cuda_graph", 1.0, bound(idle), "a graph is launched at once, without gaps"),
             _freed("fewer, larger kernels: larger batches, no Python loops over parts of a batch", idle)]  # fmt: skip
    return cause(Bottleneck.LAUNCH_OVERHEAD, idle, bound(idle), 0.75, lines, "", tries)


def _freed(edit: str, idle: float) -> Try:
    return by_edit(edit, bound(idle * 0.4), bound(idle), "the device works without gaps")


def _drained(seen: Seen) -> Cause | None:
    idle = _idle(seen, "sync")
    lines = [
        f"after waits of the host the device has nothing to do for {idle:.0%} of the step",
        *(
            f"{name}: {_a_step(seen, calls)}, {milliseconds(seconds / calls)} each"
            for name, calls, seconds in seen.trace.get("waits", [])[:3]
        ),
    ]
    edit = "read numbers back only every so many steps (.item(), .cpu(), print of a loss wait for the device)"
    return cause(Bottleneck.HOST_SYNC, idle, bound(idle), 0.8, lines, "", [_freed(edit, idle)])


def _between(seen: Seen) -> Cause | None:
    idle = _idle(seen, "between")
    lines = [f"the device is idle for {idle:.0%} of the step while the host is in none of the step's phases"]
    edit = "move what Python does between the phases out of the loop; perftrain diagnose train.py names the lines"
    return cause(Bottleneck.HOST_PYTHON, idle, bound(idle), 0.7, lines, "", [_freed(edit, idle)])


# --- copies and exchanges ---
def _upload(seen: Seen) -> Cause | None:
    share = _part(seen, seen.trace.get("exposed_upload_s", 0.0))
    calls, size, pageable = seen.trace.get("uploads") or (0, 0, 0)
    lines = [
        f"copies to the device take {share:.0%} of the step while no kernel runs: {_a_step(seen, calls)}, "
        f"{size / max(1, calls) / 2**20:,.3g} MiB each",
        f"{pageable} of {calls} are from pageable memory: the host waits for each of them, and they cannot overlap" if pageable else "",
    ]
    edit = "batch.to(device, non_blocking=True), from pinned memory"
    tries = [by_switch("pin_memory", 1.0, bound(share), "pinned memory is copied faster, and while kernels run")] if pageable else []
    tries += [by_switch("device_prefetch", 1.0, bound(share), "the next batch is copied while this one is computed"),
              by_edit(edit, 1.0, bound(share), "the host goes on meanwhile")]  # fmt: skip
    return cause(Bottleneck.INPUT_TRANSFER, share, bound(share), 0.8, lines, "", tries)


def _communication(seen: Seen) -> Cause | None:
    share = _part(seen, seen.trace.get("exposed_communication_s", 0.0))
    rows = [row for row in seen.trace["kernels"] if row[1] == "communication"]
    calls, seconds = sum(row[2] for row in rows), sum(row[3] for row in rows)
    if not calls:
        return None
    lines = [
        f"exchanges between ranks take {_part(seen, seconds):.0%} of the step, {share:.0%} of it while nothing is computed "
        "(waiting for slower ranks included)",
        f"{_a_step(seen, calls)}, {milliseconds(seconds / calls)} each",
    ]
    if seconds / calls < SHORT_CALL_S:
        edit = "exchange gradients in few, large tensors (DistributedDataParallel's buckets: bucket_cap_mb)"
        return cause(Bottleneck.COMM_SYNC, share, bound(share), 0.7, lines, "", [by_edit(edit, 1.0, bound(share), "fewer exchanges")])
    edit = "exchange 16-bit gradients: ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)"
    half = by_edit(edit, 1.0, bound(share * 0.5), "half the bytes")
    return cause(Bottleneck.COMM_VOLUME, share, bound(share), 0.7, lines, "", [half])


# --- kernels ---
def _layout(seen: Seen) -> Cause | None:
    share = _part(seen, seen.trace["class_s"].get("layout", 0.0))
    lines = [f"kernels that turn tensors from channels-first to channels-last order and back take {share:.0%} of the step"]
    tries = [by_switch("channels_last", 1.0, bound(share), "tensors that lie that way already are not turned")]
    return cause(Bottleneck.COMPUTE_LAYOUT, share, bound(share), 0.85, lines, "", tries)


def _precision(seen: Seen) -> Cause | None:
    """Only where the machine's peaks are known: a report alone does not tell what fewer bits would give."""
    share, factor = _part(seen, seen.trace.get("float32_s", 0.0)), precision_factor(seen.peaks)
    upper = bound(share * (1 - 1 / factor)) if factor > 1 else 1.0
    lines = [f"products and convolutions in float32, without tensor cores, take {share:.0%} of the step",
             f"this machine multiplies bfloat16 matrices {factor:.1f} times as fast (measured)"]  # fmt: skip
    tries = [by_switch("amp", 1.0, upper, "products in 16 bits"), by_switch("tf32", 1.0, upper, "products in 19 bits")]
    return cause(Bottleneck.COMPUTE_PRECISION, share, upper, 0.7, lines, "", tries)


def _memory_bound(seen: Seen) -> Cause | None:
    """Elementwise kernels in chains, of which fusing leaves one. That they are bound by memory, ncu has measured, or it is likely."""
    share = _part(seen, seen.trace.get("fusible_s", 0.0))
    known, elementwise_s = seen.trace.get("bound_s"), seen.trace["class_s"].get("elementwise", 0.0)
    lines = [
        f"kernels bound by memory take {_part(seen, known['memory']):.0%} of the kernels' time (measured: at least 60% of its peak)"
        if known
        else f"elementwise kernels take {_part(seen, elementwise_s):.0%} of the step (--ncu tells how near the memory's peak they come)",
        f"chains of elementwise kernels, one after the other, hold {share:.0%} that one fused kernel in each would not need",
        *reached_lines(seen)[:3],
    ]
    tries = [by_switch("compile", 1.0, bound(share), "a chain is fused into one kernel, which reads and writes once")]
    return cause(Bottleneck.COMPUTE_MEMORY_BOUND, share, bound(share), 0.8 if known else 0.5, lines, "", tries)


def _small_kernels(seen: Seen) -> Cause | None:
    share = _part(seen, seen.trace.get("unfilled_s", 0.0))
    lines = [
        f"kernels shorter than 10 us that reach 60% of no peak take {_part(seen, seen.trace.get('tiny_s', 0.0)):.0%} of the kernels' time: "
        "they are too small to fill the device",
        *reached_lines(seen)[:3],
    ]
    edit = "fewer, larger kernels: larger batches, torch.compile, no Python loops over parts of a batch"
    larger = by_edit(edit, 1.0, bound(share), "larger kernels fill the device")
    return cause(Bottleneck.LAUNCH_OVERHEAD, share, bound(share), 0.7, lines, "", [larger])


def reached_lines(seen: Seen) -> list[str]:
    """What ncu measured of the kernels that take most of the time."""
    return [
        f"{name[:60]}: {_part(seen, seconds):.0%} of the time, at {compute:.0%} of peak compute and {memory:.0%} of peak memory throughput"
        for name, seconds, compute, memory in seen.trace.get("reached", [])
        if _part(seen, seconds) > 0.05
    ]


# --- nothing found ---
def without_a_cause(seen: Seen) -> tuple[Cause, bool, str]:
    """(cause, whether that is healthy, sentence) of a device's timeline in which no rule found anything."""
    trace = seen.trace
    known = trace.get("bound_s")
    busy = _part(seen, trace["device_busy_s"])
    kinds = [f"{label} {_part(seen, seconds):.0%}" for label, seconds in list(trace["class_s"].items())[:5]]
    lines = [f"kernels by kind, of the time: {', '.join(kinds)}", *reached_lines(seen)[:4]]
    single = _part(seen, trace.get("float32_s", 0.0))
    if single > 0.2:
        lines.append(f"{single:.0%} of it are products in float32 without tensor cores: perftrain try amp, or tf32, tells what that costs")
    if not known:
        lines.append(f"the device is busy {busy:.0%} of the time, which does not tell how well it is used: perftrain diagnose --ncu does")
        head = "Around the kernels nothing was found, and how well they use the device only --ncu tells"
        return cause(Bottleneck.COMPUTE_SATURATED, busy, 1.0, 0.4, lines), False, f"{head}: it is busy {busy:.0%} of the step."
    parts = {kind: _part(seen, seconds) for kind, seconds in known.items()}
    bounds = f"{parts['compute']:.0%} bound by compute, {parts['memory']:.0%} by memory, {parts['neither']:.0%} by neither"
    healthy = parts["neither"] < 0.5 and single <= 0.2
    head = "The kernels come near the device's peaks" if healthy else "Much of the kernels' time comes near no peak of the device"
    if parts["neither"] < 0.5 and not healthy:
        head = "The kernels come near the device's peaks, but many are in float32 without tensor cores"
    return cause(Bottleneck.COMPUTE_SATURATED, 1 - parts["neither"], 1.0, 0.8, lines), healthy, f"{head}: {bounds}."
