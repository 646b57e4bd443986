"""Rules on computing: precision, layout, launching, memory traffic, redundant work, compiling, threads, the optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from perftrain.diagnose.finding import (
    NOTABLE,
    bound,
    by_edit,
    by_probe,
    by_switch,
    cause,
    milliseconds,
    saved,
    source_of,
    top_evidence,
    top_function,
    top_line,
)
from perftrain.diagnose.probe import Probe
from perftrain.diagnose.roofline import roofline_line
from perftrain.diagnose.seen import CONVOLUTION, MATMUL, Seen
from perftrain.facts import Bottleneck, Cause, Evidence, Try


def compute_causes(seen: Seen) -> Iterator[Cause]:
    for rule in (_anomaly, _recomputing, _deterministic, _unused_forward, _unused_gradients, _threads, _recompiling, _graph_breaks,
                 _optimizer, _precision, _layout, _memory_or_launch):  # fmt: skip
        found = rule(seen)
        if found is not None and found.upper_bound >= NOTABLE:
            yield found


def measured(seen: Seen, name: str) -> Probe | None:
    """A probe that ran."""
    probe = seen.probes.get(name)
    return probe if probe is not None and probe.blocks and not probe.error else None


# --- work that need not be done ---
def _anomaly(seen: Seen) -> Cause | None:
    probe = measured(seen, "anomaly_off")
    if not seen.process.get("anomaly") or probe is None:
        return None
    lines = ["torch.autograd anomaly detection is on: every node of the backward pass is checked and keeps a stack trace",
             f"without it, in turns: {probe.speedup:.2f}×"]  # fmt: skip
    return cause(Bottleneck.COMPUTE_REDUNDANT, saved(probe.speedup), probe.speedup, 0.95, lines, "", [by_probe("anomaly_off", probe)])


def _recomputing(seen: Seen) -> Cause | None:
    probe = measured(seen, "checkpointing_off")
    if not seen.process["counts"].get("recomputed_blocks") or probe is None:
        return None
    lines = [f"activation checkpointing computes {seen.count('recomputed_blocks'):.0f} blocks of a step twice",
             f"without it, in turns: {probe.speedup:.2f}×, and the memory was there"]  # fmt: skip
    return cause(Bottleneck.COMPUTE_REDUNDANT, saved(probe.speedup), probe.speedup, 0.9, lines, "", [by_probe("checkpointing_off", probe)])


def _deterministic(seen: Seen) -> Cause | None:
    probe = measured(seen, "deterministic_off")
    if not seen.process.get("deterministic") or probe is None:
        return None
    lines = ["deterministic algorithms are asked for", f"without them, in turns: {probe.speedup:.2f}×"]
    edit = by_edit("torch.use_deterministic_algorithms(False)", probe.low, probe.high, f"measured here in turns: {probe.speedup:.2f}×")
    return cause(Bottleneck.COMPUTE_REDUNDANT, saved(probe.speedup), probe.speedup, 0.8, lines, "", [edit])


def _unused_forward(seen: Seen) -> Cause | None:
    """Forward passes of a step through whose outputs no gradient ever came, or only zeros (which are carried backward too)."""
    calls = seen.trace.get("forwards") or []
    back = seen.share("backward") / max(1e-9, seen.share("forward"))
    wasted = sum(c["seconds"] * (1 + back if c.get("zero") else 1.0) for c in calls if not c["used"])
    share = wasted / max(1e-9, seen.trace.get("wall_s") or 0.0)
    number = sum(not c["used"] for c in calls) / max(1, seen.trace.get("steps") or 1)
    zeros = any(c.get("zero") for c in calls)
    if not any(c["used"] for c in calls) or bound(share) < NOTABLE or (zeros and number < 0.9):
        return None
    names = sorted({c["module"] for c in calls if not c["used"]})
    why = "the gradient that comes back is zero (a loss with the weight 0?)" if zeros else "no gradient comes back through what they return"
    lines: list[str | Evidence] = [
        f"{number:.2g} forward passes of {', '.join(names)} a step are never used: {why}",
        f"they take {share:.0%} of the step",
        *top_evidence(seen, "forward", least=0.3),
    ]
    edit = by_edit("drop the forward pass whose result is not used; put it under torch.no_grad() if only its value is "
        "wanted", bound(share * 0.8), bound(share),
                   "work that nobody uses")  # fmt: skip
    return cause(Bottleneck.COMPUTE_REDUNDANT, share, bound(share), 0.85, lines, _root_call(seen), [edit])


def _root_call(seen: Seen) -> str:
    """The outermost line of the user's that was seen in the forward phase."""
    for sample in seen.samples:
        if sample.phase == "forward" and sample.frames:
            return seen.relative(f"{sample.frames[-1][0]}:{sample.frames[-1][1]}")
    return ""


def _unused_gradients(seen: Seen) -> Cause | None:
    found = seen.trace.get("gradients") or {}
    unused = found.get("unused_share", 0.0)
    probe = measured(seen, "unused_gradients_off")
    share = saved(probe.speedup) if probe else seen.share("backward") * unused * 0.5
    if (not probe and unused < 0.2) or bound(share) < NOTABLE:
        return None
    lines = [f"{unused:.0%} of the gradients are of parameters that no optimizer holds ({', '.join(found.get('unused', []))}, ...)",
             f"without them, in turns: {probe.speedup:.2f}×" if probe else ""]  # fmt: skip
    low, high = (probe.low, probe.high) if probe else (bound(share * 0.5), bound(2 * share))
    edit = by_edit(
        "module.requires_grad_(False) for what is not trained; what only makes a target belongs under torch.no_grad()",
        low, high, "their gradients are computed for nothing",
    )  # fmt: skip
    return cause(Bottleneck.COMPUTE_REDUNDANT, share, bound(share), 0.9 if probe else 0.6, lines, "", [edit])


# --- threads ---
def _threads(seen: Seen) -> Cause | None:
    probe = measured(seen, "threads")
    if probe is None or probe.low < 1.05:
        return None
    to = seen.cores if seen.threads != seen.cores else 1
    lines = [
        f"torch computes with {seen.threads} thread{'s' * (seen.threads != 1)} on {seen.cores} cores",
        f"with {to}, in turns: {probe.speedup:.2f}×",
    ]
    where = top_line(seen, "forward")
    return cause(Bottleneck.THREADS_CONFIG, saved(probe.speedup), probe.speedup, 0.9, lines, where, [by_probe("threads", probe)])


# --- compiling ---
def _recompiling(seen: Seen) -> Cause | None:
    """Compilations that go on after the first steps."""
    compiling = seen.process.get("compiling") or {}
    late = compiling.get("late_s", 0.0)
    number = compiling.get("late", 0)
    rows = seen.process["rows"]
    if number < 2 and not compiling.get("limit_hits"):
        return None
    times = seen.step_times(range(min(2, len(rows) - 1), len(rows)))
    usual = sorted(times)[len(times) // 2]
    if compiling.get("late_rows"):
        quick = [t for i, t in enumerate(times) if i + 2 not in set(compiling["late_rows"])]
        usual = sorted(quick)[len(quick) // 2] if quick else min(times)
    whole = sum(times)
    upper = whole / max(1e-9, usual * len(times))
    share = max(0.0, min(0.99, late / max(1e-9, whole)))
    lines = [
        f"{number} compilations after the first steps took {late:.1f} s, {share:.0%} of the time; a step without one "
        f"takes {milliseconds(usual)}",
        f"compiled again and again: {', '.join(compiling.get('names', [])[:2])}",
        f"the limit of recompilations was reached {compiling['limit_hits']} times; from then on the code runs uncompiled"
        if compiling.get("limit_hits")
        else "",
    ]
    edit = by_edit(
        "torch.compile(..., dynamic=True), or pad inputs to a few fixed shapes", 0.5 * upper, upper, "one compilation serves all shapes"
    )
    where = next(iter(compiling.get("names", [])), "").split(" ")[0]
    return cause(Bottleneck.COMPILE_RECOMPILE, share, max(upper, bound(share)), 0.95, lines, seen.relative(where), [edit])


def _graph_breaks(seen: Seen) -> Cause | None:
    compiling = seen.process.get("compiling") or {}
    breaks, given_up = compiling.get("graph_breaks") or {}, compiling.get("given_up") or {}
    if not (breaks or given_up) or not seen.traced_computing_s or compiling.get("late", 0) >= 4:
        return None
    eager = max(0.0, 1 - seen.trace.get("compiled_s", 0.0) / seen.traced_computing_s) * seen.share("forward", "backward")
    fusible = max(0.0, eager - seen.heavy_share) if given_up else eager  # products are as fast uncompiled
    share = fusible * 0.7
    if bound(share) < NOTABLE:
        return None
    places = [seen.relative(w) for w in (*given_up, *compiling.get("break_lines", []))]
    lines: list[str | Evidence] = [
        f"{sum(breaks.values())} graph breaks: {eager:.0%} of the step is spent around the compiled code, not in it" if breaks else "",
        f"the compiler gave up on {len(given_up)} function{'s' * (len(given_up) > 1)}, run as if not compiled" if given_up else "",
        *[f"graph break: {b}" for b in [*given_up.values(), *breaks][:2]],
        *[Evidence(f"at {where}: {source_of(seen, where)}", where) for where in places[:2]],
    ]
    edit = by_edit("take what breaks the graph out of the compiled function (printing, .item(), data-dependent "
        "branches); torch._dynamo.explain names the lines",
                   bound(share * 0.5), bound(share), "one graph is fused and has no Python in between")  # fmt: skip
    return cause(Bottleneck.COMPILE_GRAPH_BREAK, share, bound(share), 0.7, lines, next(iter(places), ""), [edit])


# --- the optimizer ---
def _optimizer(seen: Seen) -> Cause | None:
    if seen.on_cuda and not seen.process.get("optimizers"):
        return None  # of a report: the host's clock does not tell what the optimizer costs the device
    share = seen.share("optimizer")
    gradients = seen.trace.get("gradients") or {}
    sparse = gradients.get("embedding_touched", 1.0) < 0.3 and gradients.get("embedding_share", 0.0) > 0.5
    whole = share + (seen.operation_share(("embedding_dense_backward", "embedding_backward")) if sparse else 0.0)
    probes = [p for p in (measured(seen, "fused"), measured(seen, "foreach")) if p is not None]
    best = max((p for p in probes if p.low > 1.03), key=lambda p: p.speedup, default=None)
    tries: list[Try] = []
    upper = 1.0
    if sparse:
        upper = bound(whole * 0.9)
        reason = f"only {gradients['embedding_touched']:.1%} of the rows get a gradient"
        tries.append(by_edit("Embedding(..., sparse=True) with torch.optim.SparseAdam for the tables", 0.75 * upper, upper, reason))
    if best is not None:
        tries.append(by_probe(best.name, best))
        upper = max(upper, best.speedup)
    elif not probes and not sparse and _fusible(seen):
        upper = bound(share * 0.5)
        tries.append(by_switch("fused", 1.0, upper, "one pass over all parameters"))
    elif (about := (seen.process.get("optimizers") or [{}])[0]).get("by_hand") and about.get("tensors", 0) > 20 and not sparse:
        upper = bound(share * 0.85)
        edit = "an optimizer of torch.optim with fused=True in its place: a loop over the tensors costs several calls for each"
        tries.append(by_edit(edit, bound(share * 0.6), upper, f"{about['tensors']} tensors are updated one by one"))
    elif share > 0.3 and not sparse:
        upper = bound(share * 0.6)
        edit = "a cheaper optimizer, fewer and larger parameters, or gradients accumulated over several backward passes before each update"
        tries.append(by_edit(edit, bound(share * 0.3), upper, "the update itself takes the time"))
    if share < 0.1 or upper < NOTABLE:
        return None
    about = (seen.process.get("optimizers") or [{}])[0]
    lines: list[str | Evidence] = [
        f"the optimizer takes {share:.0%} of the step ({about.get('class', '')}, {about.get('parameters', 0):,} "
        f"parameters in {about.get('tensors', 0)} tensors)",
        f"only {gradients['embedding_touched']:.1%} of the rows of the embedding tables get a gradient, and all are updated"
        if sparse
        else "",
        *(f"{p.name}, in turns: {p.speedup:.2f}×" for p in probes),
    ]
    return cause(Bottleneck.OPTIMIZER_STEP, whole, upper, 0.85, lines, top_line(seen, "optimizer"), tries)


def _fusible(seen: Seen) -> bool:
    return any(o.get("can_fuse") and not o.get("fused") for o in seen.process.get("optimizers") or [])


# --- numbers ---
def _precision(seen: Seen) -> Cause | None:
    doubles = seen.operation_share((*MATMUL, *CONVOLUTION), ("double",))
    if doubles > 0.2:
        every = seen.operation_share(("",), ("double",))
        # half the bytes, and half the time of a product, on a CPU; a GPU's units for float64 are few
        upper = bound(0.5 * every + (0.4 * doubles if seen.on_cuda else 0.0))
        lines = [f"products and convolutions in float64 take {doubles:.0%} of the step, all operations in float64 {every:.0%}"]
        edit = by_edit(
            "train in float32 (torch.set_default_dtype, dtype of the data)", bound(doubles * 0.4), upper, "half the bytes a number"
        )
        return cause(Bottleneck.COMPUTE_PRECISION, doubles, upper, 0.8, lines, top_line(seen, "forward"), [edit])
    probe = measured(seen, "amp")
    single = seen.operation_share((*MATMUL, *CONVOLUTION), ("float", "TensorList"), without=("foreach", "embedding"))
    if probe is None or probe.low < 1.03:
        return None
    lines = [
        f"products and convolutions in float32 take {single:.0%} of the step",
        f"under bfloat16 autocast, in turns: {probe.speedup:.2f}×",
        roofline_line(seen),
    ]
    return cause(
        Bottleneck.COMPUTE_PRECISION, saved(probe.speedup), probe.speedup, 0.9, lines, top_line(seen, "forward"), [by_probe("amp", probe)]
    )


def _layout(seen: Seen) -> Cause | None:
    probe = measured(seen, "channels_last")
    conversions = seen.trace.get("layout_s", 0.0) / max(1e-9, seen.trace.get("wall_s") or 1e9)
    if probe is not None and probe.low > 1.03:
        lines = [
            f"convolutions take {seen.operation_share(CONVOLUTION):.0%} of the step, on tensors in channels-first order",
            f"channels last, in turns: {probe.speedup:.2f}×",
        ]
        return cause(
            Bottleneck.COMPUTE_LAYOUT,
            saved(probe.speedup),
            probe.speedup,
            0.85,
            lines,
            top_line(seen, "forward"),
            [by_probe("channels_last", probe)],
        )
    if conversions > 0.25:
        upper = bound(conversions * 0.7)
        lines = [f"copying tensors into another memory layout takes {conversions:.0%} of the step"]
        edit = by_edit(
            "keep one memory format and one order of dimensions through the model; convert once, at its input",
            bound(conversions * 0.4),
            upper,
            "a conversion that is not made costs nothing",
        )
        return cause(Bottleneck.COMPUTE_LAYOUT, conversions, upper, 0.5, lines, top_line(seen, "forward"), [edit])
    return None


def _memory_or_launch(seen: Seen) -> Cause | None:
    """Both are cured by fusing; which it is depends on how long the operations are."""
    if _graph_breaks(seen):
        return None  # the compiler is there to fuse them
    probe = measured(seen, "compile")
    launching, moving = seen.launch_share, seen.elementwise_share
    computing = seen.share("forward", "backward")
    per_call = computing * seen.step_s / max(1.0, seen.calls_per_step)
    helps = probe is not None and probe.low > 1.15 and probe.speedup > 1.22  # a compiler is a larger change than a flag: it must pay
    tries = [by_probe("compile", probe)] if probe is not None and helps else []
    many = seen.calls_per_step > 2000  # no model is that deep: something loops over samples, heads or time
    if launching > moving and launching > (0.25 if many else 0.4) * computing and seen.calls_per_step > 300 and not _library_loop(seen):
        upper = max(probe.speedup if probe else 1.0, bound(launching * 0.95))
        where, function, share = top_function(seen, "forward")
        lines: list[str | Evidence] = [
            f"a step calls {seen.calls_per_step:,.0f} operations, {1e6 * per_call:.0f} us each on average: launching "
            f"them is about {launching:.0%} of the step",
            Evidence(f"{share:.0%} of the forward pass and the loss is spent in {function}", where) if where else "",
            *top_evidence(seen, "forward", least=0.15),
        ]
        edit = by_edit("one operation over the whole sequence or batch instead of a Python loop of small ones "
            "(nn.LSTM instead of cells, batched matmul, torch.nn.functional)",
                       bound(launching * 0.5), bound(launching * 0.95), "fewer, larger operations")  # fmt: skip
        return cause(Bottleneck.LAUNCH_OVERHEAD, launching, upper, 0.7, lines, where, [*tries, edit])
    if probe is not None and helps and moving > 0.3:
        lines = [
            f"operations that only move and change numbers one by one take {moving:.0%} of the step",
            f"compiled (fused), in turns: {probe.speedup:.2f}×",
            roofline_line(seen),
        ]
        return cause(Bottleneck.COMPUTE_MEMORY_BOUND, saved(probe.speedup), probe.speedup, 0.85, lines, top_line(seen, "forward"), tries)
    return None


def _library_loop(seen: Seen) -> bool:
    """A recurrent layer of torch itself, which is a loop of small operations inside torch: nothing that the user wrote."""
    roots = seen.process.get("roots") or []
    return any(r.get("recurrent") for r in roots) and not any(r.get("cells") for r in roots)
