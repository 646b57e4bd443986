"""All rules together: which probes are worth their time, and the ranked diagnosis."""

from __future__ import annotations

import warnings
from dataclasses import replace

from perftrain.diagnose.comm_rules import comm_causes
from perftrain.diagnose.compute_rules import compute_causes, measured
from perftrain.diagnose.device_rules import device_causes, without_a_cause
from perftrain.diagnose.finding import NOTABLE, bound, milliseconds
from perftrain.diagnose.host_rules import host_causes
from perftrain.diagnose.input_rules import input_causes, workers_gain
from perftrain.diagnose.roofline import roofline_line
from perftrain.diagnose.seen import CONVOLUTION, MATMUL, Seen
from perftrain.facts import Avoid, Bottleneck, Cause, Diagnosis

HEALTHY_BELOW = 1.15
"""If nothing promises more than this, there is nothing to recommend."""
MOST_CAUSES = 4


def wanted_probes(seen: Seen) -> tuple[str, ...]:
    """The counterfactuals that what was seen makes worth measuring, the most telling first."""
    computing = seen.share("forward", "backward")
    single = seen.operation_share((*MATMUL, *CONVOLUTION), ("float", "TensorList"), without=("foreach", "embedding"))
    roots = seen.process.get("roots") or []
    optimizers = seen.process.get("optimizers") or []
    gradients = [i for i in seen.trace.get("inputs", []) if i and i["longest_share"] < 0.85]
    unused = (seen.trace.get("gradients") or {}).get("unused_share", 0.0)
    compiled = any((seen.process.get("compiling") or {}).get(k) for k in ("frames", "given_up"))
    loading_cpu = seen.fetching["cpu_s"] / max(1.0, seen.fetching["batches"]) / max(1e-9, seen.cores * seen.step_s)
    fed_by_workers = seen.workers > 0 and (bound(seen.share("data_wait")) > NOTABLE or loading_cpu > 0.15)
    if fed_by_workers and "cached_batches" not in seen.probes:
        return ("cached_batches",)  # batches run ahead and steal cores: only the program without loading tells what computing costs
    wishes = {
        "anomaly_off": bool(seen.process.get("anomaly")),
        "checkpointing_off": bool(seen.process["counts"].get("recomputed_blocks")),
        "deterministic_off": bool(seen.process.get("deterministic")),
        "unused_gradients_off": seen.ranks == 1 and unused > 0.02,
        "no_gc": seen.count("gc_s", "sums") > 0.05 * seen.whole_step_s,
        "no_communication": seen.ranks > 1 and any(r.get("ddp") for r in roots),
        "no_sync": seen.ranks > 1 and seen.backwards_per_step > 1 and any(r.get("ddp") for r in roots),
        "threads": seen.ranks == 1 and seen.threads != seen.cores and not seen.on_cuda,
        "short_batches": bool(gradients) and seen.share("data_wait") > 0,
        "fused": seen.share("optimizer") > 0.08 and any(o.get("can_fuse") and not o.get("fused") for o in optimizers),
        "foreach": seen.share("optimizer") > 0.08
        and any(o.get("can_foreach") and not o.get("can_fuse") and not o.get("foreach") for o in optimizers),
        "amp": single > 0.15 and computing > 0.2 and seen.ranks == 1,
        "channels_last": seen.ranks == 1 and seen.operation_share(CONVOLUTION) > 0.12
        and any(r["convolutions"] and not r["channels_last"] for r in roots),
        "compile": not compiled and seen.ranks == 1 and not any(r.get("recurrent") or r.get("cells") for r in roots)
        and computing > 0.5 and (seen.elementwise_share > 0.3 or seen.launch_share > 0.4),
    }  # fmt: skip
    return tuple(name for name, wish in wishes.items() if wish)


def _causes(seen: Seen) -> list[Cause]:
    """What the rules say. One that breaks takes nothing from the others, and is told."""
    found: list[Cause] = []
    for rules in (input_causes, host_causes, compute_causes, comm_causes, device_causes):
        try:
            found += rules(seen)
        except Exception as error:
            told = f"{rules.__name__} of perftrain broke ({type(error).__name__}: {error}): causes may be missing. Please report it."
            warnings.warn(told, RuntimeWarning, stacklevel=2)
    return found


def diagnose(seen: Seen) -> Diagnosis:
    """The ranked causes. Healthy if none of them promises much."""
    causes = [c for c in _merged(_causes(seen)) if c.upper_bound >= HEALTHY_BELOW]
    causes.sort(key=lambda c: -(1 - 1 / c.upper_bound) * (0.5 + 0.5 * c.confidence))
    breakdown = seen.breakdown()
    if not causes and "class_s" in seen.trace:
        only, healthy, sentence = without_a_cause(seen)
        return Diagnosis(breakdown, (replace(only, avoids=avoids(seen, ())),), healthy, sentence)
    if not causes:
        return Diagnosis(breakdown, (_saturated(seen),), True, _healthy_sentence(seen))
    ranked = tuple(_with_avoids(c, seen) if i == 0 else c for i, c in enumerate(causes[:MOST_CAUSES]))
    return Diagnosis(breakdown, ranked, False, _sentence(ranked[0], seen))


def _merged(causes: list[Cause]) -> list[Cause]:
    """One cause for each label: the one that promises most."""
    best: dict[Bottleneck, Cause] = {}
    for each in causes:
        if each.label not in best or each.upper_bound > best[each.label].upper_bound:
            best[each.label] = each
    return list(best.values())


def _saturated(seen: Seen) -> Cause:
    from perftrain.diagnose.finding import cause

    computing = seen.share("forward", "backward")
    heavy = seen.heavy_share
    lines = [f"forward and backward take {computing:.0%} of the step, products and convolutions {heavy:.0%}", roofline_line(seen),
             *(f"{p.name}, in turns: {p.speedup:.2f}×" for p in seen.probes.values() if p.blocks)]  # fmt: skip
    return Cause(**{**cause(Bottleneck.COMPUTE_SATURATED, computing, 1.0, 0.8, lines).__dict__, "avoids": avoids(seen, ())})


def _with_avoids(first: Cause, seen: Seen) -> Cause:
    return Cause(**{**first.__dict__, "avoids": avoids(seen, [t.switch for t in first.tries if t.switch])})


def avoids(seen: Seen, recommended: tuple[str, ...] | list[str]) -> tuple[Avoid, ...]:
    """The popular switches that will not help here, each with its number."""
    waiting = seen.share("data_wait")
    marked = {p for p in ("data_wait", "optimizer") if seen.process["pid"] or p in seen.phases}  # a report may tell nothing of them
    reasons = {
        "workers": _against_workers(seen, waiting) if "data_wait" in marked else "",
        "pin_memory": "there is no device to copy to" if not seen.on_cuda else "",
        "prefetch": f"waiting for batches is {waiting:.0%} of the step" if waiting < 0.05 and "data_wait" in marked else "",
        "amp": _against_probe(seen, "amp") or _against_amp(seen),
        "tf32": _against_amp(seen),
        "channels_last": _against_probe(seen, "channels_last") or _against_channels_last(seen),
        "compile": _against_probe(seen, "compile"),
        "fused": _against_probe(seen, "fused")
        or (
            f"the optimizer is {seen.share('optimizer'):.0%} of the step"
            if seen.share("optimizer") < 0.05 and "optimizer" in marked
            else ""
        ),
        "threads": f"torch already computes with {seen.threads} threads on {seen.cores} cores"
        if seen.threads == seen.cores and seen.process["pid"]
        else "",
    }
    return tuple(Avoid(name, because) for name, because in reasons.items() if because and name not in recommended)


def _against_workers(seen: Seen, waiting: float) -> str:
    if bound(waiting) < 1.08:
        return f"waiting for batches is {waiting:.0%} of the step: at most {bound(waiting):.2f}×"
    gain, _ = workers_gain(seen)
    return f"the cores are busy already: more workers would give about {gain:.2f}×" if gain < 1.08 else ""


def _against_probe(seen: Seen, name: str) -> str:
    probe = measured(seen, name)
    if probe is not None and probe.high < NOTABLE:
        return f"tried here in turns: {probe.speedup:.2f}×"
    return ""


def _against_amp(seen: Seen) -> str:
    if "class_s" in seen.trace:  # the kernels' own names
        share = seen.trace["float32_s"] / max(1e-9, seen.trace["wall_s"])
        return f"products in float32 without tensor cores are {share:.0%} of the step" if share < 0.1 else ""
    low = seen.operation_share((*MATMUL, *CONVOLUTION), ("c10::BFloat16", "c10::Half", "BFloat16"))
    single = seen.operation_share((*MATMUL, *CONVOLUTION), ("float",), without=("foreach", "embedding"))
    if low > single:
        return "products and convolutions are in 16 bits already"
    return f"products and convolutions in float32 are {single:.0%} of the step" if single < 0.1 and seen.trace.get("wall_s") else ""


def _against_channels_last(seen: Seen) -> str:
    roots = seen.process.get("roots") or []
    if not roots:
        return ""
    if not any(r["convolutions"] for r in roots):
        return "the model has no 2-d convolutions"
    return "the convolutions are channels last already" if all(r["channels_last"] for r in roots if r["convolutions"]) else ""


def _sentence(first: Cause, seen: Seen) -> str:
    return (
        f"{MEANING[first.label]}: about {first.share:.0%} of the {milliseconds(seen.step_s)} "
        f"{'of kernels that were measured' if 'bound_s' in seen.trace else 'step'}; "
        f"without it at most {first.upper_bound:.2f}× as fast."
    )


def _healthy_sentence(seen: Seen) -> str:
    return (
        f"Nothing to gain: computing takes {seen.share('forward', 'backward'):.0%} of the {milliseconds(seen.step_s)} step, "
        f"and no cause promises {HEALTHY_BELOW - 1:.0%}."
    )


MEANING = {
    Bottleneck.INPUT_STORAGE: "Training waits for storage or the network",
    Bottleneck.INPUT_DECODE: "Training waits for samples to be decoded and transformed",
    Bottleneck.INPUT_WORKERS: "Batches are made while nothing else runs",
    Bottleneck.INPUT_WORKER_RESTART: "The loader's workers are started anew again and again",
    Bottleneck.INPUT_COLLATE: "Batches are picked together sample by sample",
    Bottleneck.INPUT_TRANSFER: "Copying batches to the device",
    Bottleneck.PADDING_WASTE: "Much of what is computed is padding",
    Bottleneck.HOST_SYNC: "The program stops to read numbers back",
    Bottleneck.HOST_PYTHON: "Python between the phases takes the time",
    Bottleneck.LAUNCH_OVERHEAD: "The model is a great many tiny operations",
    Bottleneck.COMPUTE_PRECISION: "Products are computed in more bits than this machine is fast in",
    Bottleneck.COMPUTE_LAYOUT: "Tensors lie in a layout that the machine is slow with",
    Bottleneck.COMPUTE_MEMORY_BOUND: "Element by element operations move memory back and forth",
    Bottleneck.COMPUTE_REDUNDANT: "Work is done that nobody needs",
    Bottleneck.COMPUTE_SATURATED: "Computing rules",
    Bottleneck.THREADS_CONFIG: "The number of threads does not fit the cores",
    Bottleneck.OPTIMIZER_STEP: "The optimizer takes the time",
    Bottleneck.COMPILE_RECOMPILE: "The model is compiled again and again",
    Bottleneck.COMPILE_GRAPH_BREAK: "Graph breaks keep the compiler from its work",
    Bottleneck.MEMORY_GROWTH: "Memory grows with every step",
    Bottleneck.MEMORY_CAPACITY: "Memory limits the batch",
    Bottleneck.COMM_VOLUME: "The ranks exchange too much",
    Bottleneck.COMM_SYNC: "The ranks exchange too often",
    Bottleneck.COMM_IMBALANCE: "The ranks wait for the slowest",
    Bottleneck.LOOP_EVAL: "Evaluation takes the time",
    Bottleneck.LOOP_CHECKPOINT: "Saving checkpoints takes the time",
    Bottleneck.STARTUP: "Starting takes the time",
}
