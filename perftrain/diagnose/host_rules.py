"""Rules on what the host does between the phases: Python, waiting for the device, evaluation, checkpoints, memory."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator

from perftrain.diagnose.finding import NOTABLE, bound, by_edit, by_probe, cause, milliseconds, saved, source_of, top_evidence, top_line
from perftrain.diagnose.input_rules import DECODERS
from perftrain.diagnose.seen import Sample, Seen
from perftrain.facts import Bottleneck, Cause, Evidence

READS_A_NUMBER = re.compile(r"\.item\(|\.tolist\(|\.cpu\(|\.numpy\(|\bfloat\(|\bbool\(|isnan|isfinite|synchronize\(|\.any\(\)|\.all\(\)")
UPDATES = re.compile(r"\.grad\b|\.data\b.*[-+]=|\.(add_|addcdiv_|sub_|mul_|lerp_)\(")
"""What an optimizer written by hand looks like."""
PUTS_IN_PLACE = re.compile(r"\bos\.(replace|renames?|fsync|link)\(|shutil\.(move|copy\w*)\(|\.rename\(")
WAITS = ("sleep", "read", "recv", "open", "select", "poll", "urlopen", "load", "acquire", "wait", "get")


def host_causes(seen: Seen) -> Iterator[Cause]:
    for phase, label, edit in (
        ("evaluation", Bottleneck.LOOP_EVAL, "evaluate less often, or on a part of the held-out data"),
        ("checkpoint", Bottleneck.LOOP_CHECKPOINT, "save less often, or in the background (torch.distributed.checkpoint.async_save)"),
    ):
        if found := _now_and_then(seen, phase, label, edit):
            yield found
    if found := _evaluation_that_looks_like_training(seen):
        yield found
    yield from _garbage(seen)
    yield from _between(seen)
    yield from _growth(seen)


def _now_and_then(seen: Seen, phase: str, label: Bottleneck, edit: str) -> Cause | None:
    """A phase that only some steps have."""
    share = seen.share(phase)
    if phase == "checkpoint":
        share += _saving_share(seen)
    upper = bound(share * 0.95)
    if upper < NOTABLE:
        return None
    rows = seen.process["rows"]
    at = [i for i in range(len(rows)) if phase in seen.phases and seen._spent(i, phase, 0) > 0]
    every = (at[-1] - at[0]) / (len(at) - 1) if len(at) > 1 else float(len(rows))
    each = share * seen.step_s * every
    lines: list[str | Evidence] = [
        f"{phase} takes {share:.0%} of the time: {milliseconds(each)} every {f'{every:.0f} steps' if every >= 1.5 else 'step'}, as long as "
        f"{each / max(1e-9, seen.step_s * (1 - share)):.1f} training steps",
        *top_evidence(seen, phase),
    ]
    tries = [
        by_edit(
            f"{edit} (every {10 * max(1, round(every))} steps instead of {max(1, round(every))})",
            bound(share * 0.8),
            upper,
            "the same work is done a tenth as often",
        )
    ]
    return cause(label, share, upper, 0.9, lines, top_line(seen, phase), tries)


def _evaluation_that_looks_like_training(seen: Seen) -> Cause | None:
    """Now and then a step has many forward passes and no more backward passes than usual: evaluation with gradients on."""
    rows = seen.process["rows"]
    if len(seen.window) < 10:
        return None
    usual = statistics.median(rows[i][1] for i in seen.window)
    at = [i for i in seen.window if rows[i][1] >= usual + 4 and rows[i][2] <= seen.backwards_per_step]
    if not 2 <= len(at) <= 0.5 * len(seen.window):
        return None
    times = dict(zip(seen.window, seen.step_times(), strict=True))
    plain = statistics.median(t for i, t in times.items() if i not in set(at))
    share = sum(times[i] - plain for i in at) / sum(times.values())
    upper = bound(share * 0.95)
    every, each = (at[-1] - at[0]) / (len(at) - 1), sum(times[i] - plain for i in at) / len(at)
    passes = statistics.fmean(rows[i][1] - usual for i in at)
    lines = [
        f"every {every:.0f} steps {passes:.0f} forward passes come without a backward pass: {milliseconds(each)}, {share:.0%} of the time",
        "gradients are recorded meanwhile, and nobody uses them",
    ]
    edit = "evaluate less often, or on a part of the held-out data, under torch.no_grad() and model.eval()"
    return cause(
        Bottleneck.LOOP_EVAL, share, upper, 0.85, lines, "", [by_edit(edit, bound(share * 0.5), upper, "the same work is done less often")]
    )


def _saving_share(seen: Seen) -> float:
    """Time outside torch.save that belongs to saving: copying the state, pickling, writing, syncing to disk."""
    whole = sum(s.seconds for s in seen.samples)
    own = sum(s.seconds for s in seen.samples if _is_saving(seen, s))
    return own / whole if whole else 0.0


def _is_saving(seen: Seen, sample: Sample) -> bool:
    words = ("save", "checkpoint", "fsync", "pickle", "state_dict", "deepcopy", "serializ")
    if sample.phase != "rest":
        return False
    if any(w in sample.library or w in sample.leaf[1] or (sample.frames and w in sample.frames[0][2]) for w in words):
        return True
    return seen.share("checkpoint") > 0 and bool(PUTS_IN_PLACE.search(_source(seen, sample)))  # what was just saved


# --- garbage collection ---
def _garbage(seen: Seen) -> Iterator[Cause]:
    share = seen.count("gc_s", "sums") / max(1e-9, seen.whole_step_s)
    probe = seen.probes.get("no_gc")
    upper = probe.speedup if probe and not probe.error else bound(share)
    if upper < NOTABLE or share < 0.08:
        return
    full = seen.count("gc_full")
    objects = int(seen.process.get("gc_objects") or 0)
    lines: list[str | Evidence] = [
        f"Python's garbage collector takes {share:.0%} of the time: {full:.2g} full collections a step over {objects:,} objects",
        f"without it, in turns: {probe.speedup:.2f}×" if probe and not probe.error else "",
        *[e for e in top_evidence(seen, "rest") if "collect" in e.line],
    ]
    tries = [by_probe("no_gc", probe)] if probe and not probe.error else []
    tries.append(
        by_edit(
            "take gc.collect() out of the loop; gc.freeze() after loading the data",
            bound(share * 0.9),
            bound(share),
            "the collections are what takes the time",
        )
    )
    yield cause(Bottleneck.HOST_PYTHON, share, upper, 0.9, lines, _collect_line(seen) or top_line(seen, "rest"), tries)


def _collect_line(seen: Seen) -> str:
    return next(
        (where for where, _, _ in seen.lines("rest", "forward", "backward", "data_wait") if "collect" in source_of(seen, where)), ""
    )


# --- between the phases ---
def _between(seen: Seen) -> Iterator[Cause]:
    """Time that belongs to no phase: making batches by hand, reading numbers back, logging, Python."""
    gc_s = min(seen.count("gc_s", "sums"), seen.phase_s("rest"))
    rest_s = seen.phase_s("rest") + seen.phase_s("sync") - gc_s
    share = rest_s / max(1e-9, seen.step_s) - _saving_share(seen)
    samples = [s for s in seen.samples if s.phase in ("rest", "sync") and "collect" not in _source(seen, s) and not _is_saving(seen, s)]
    late = [s for s in seen.samples if s.phase == "loss" and _foreign_to_loss(seen, s)]
    if late:  # between the forward and the backward pass
        share += seen.share("loss") * sum(s.seconds for s in late) / max(1e-9, sum(s.seconds for s in seen.samples if s.phase == "loss"))
        samples += late
    if bound(share) < NOTABLE:
        return
    whole = sum(s.seconds for s in samples)
    if whole < 0.3:  # too short a look to say which line
        return
    groups = {"storage": 0.0, "decode": 0.0, "sync": 0.0, "update": 0.0, "python": 0.0}
    for sample in samples:
        groups[_kind(seen, sample)] += sample.seconds
    labels = {
        "storage": Bottleneck.INPUT_STORAGE,
        "decode": Bottleneck.INPUT_DECODE,
        "sync": Bottleneck.HOST_SYNC,
        "update": Bottleneck.OPTIMIZER_STEP,
        "python": Bottleneck.HOST_PYTHON,
    }
    for kind, seconds in groups.items():
        part = share * seconds / whole
        if bound(part) >= NOTABLE:
            yield _named(seen, kind, labels[kind], part, [s for s in samples if _kind(seen, s) == kind])


def _foreign_to_loss(seen: Seen, sample: Sample) -> bool:
    """Python, waiting and reading numbers back are not what a loss is made of."""
    return (
        sample.held_s > 0.5 * sample.seconds or sample.waited_s > 0.5 * sample.seconds or bool(READS_A_NUMBER.search(_source(seen, sample)))
    )


def _source(seen: Seen, sample: Sample) -> str:
    return source_of(seen, seen.relative(sample.where)) if sample.frames else ""


def _kind(seen: Seen, sample: Sample) -> str:
    waiting = sample.waited_s > 0.4 * sample.seconds
    source = _source(seen, sample)
    if waiting and any(w in sample.leaf[1] or f"{w}(" in source for w in WAITS) and not READS_A_NUMBER.search(source):
        return "storage"
    if any(d in sample.leaf[0] or d in sample.library for d in DECODERS):
        return "decode"
    if READS_A_NUMBER.search(source):
        return "sync"
    return "update" if UPDATES.search(source) else "python"


EDITS = {
    "storage": "read ahead in other processes: a DataLoader with workers around what this line does",
    "decode": "move it into a Dataset behind a DataLoader with workers, or do it once beforehand",
    "sync": "read numbers back only every so many steps; keep them as tensors on the device until then (loss.detach())",
    "update": "an optimizer of torch.optim with fused=True instead of a loop over the parameters",
    "python": "do it once for the whole batch in torch or NumPy instead of Python for each element, or less often",
}


CONFIDENCE = {"storage": 0.85, "decode": 0.8, "sync": 0.85, "update": 0.8, "python": 0.7}


def _named(seen: Seen, kind: str, label: Bottleneck, share: float, samples: list[Sample]) -> Cause:
    by_line: dict[str, float] = {}
    for sample in samples:
        if sample.frames:
            by_line[seen.relative(sample.where)] = by_line.get(seen.relative(sample.where), 0.0) + sample.seconds
    ordered = sorted(by_line.items(), key=lambda pair: -pair[1])[:3]
    whole = sum(by_line.values()) or 1.0
    upper = bound(share * 0.95)
    lines: list[str | Evidence] = [
        f"{milliseconds(share * seen.step_s)} of every {milliseconds(seen.step_s)} step ({share:.0%}) is outside of "
        f"loading, model and optimizer"
    ]
    lines += [Evidence(f"{s / whole:.0%} of it at {where}: {source_of(seen, where)}", where) for where, s in ordered if s > 0.15 * whole]
    tries = [by_edit(EDITS[kind], bound(share * 0.6), upper, "what is not done takes no time")]
    return cause(label, share, upper, CONFIDENCE[kind], lines, ordered[0][0] if ordered else "", tries)


# --- memory ---
def _growth(seen: Seen) -> Iterator[Cause]:
    """Memory that grows for good, and steps that take longer for it."""
    waits = [seen._spent(i, "data_wait", 0) if "data_wait" in seen.phases else 0.0 for i in seen.window]
    times = [t - w for t, w in zip(seen.step_times(), waits, strict=True)]  # a queue that runs dry is no growth
    points = seen.process.get("rss") or []
    first, second = seen.growth_bytes_per_step
    if len(times) < 30 or len(points) < 12:
        return
    third = len(times) // 3
    early, middle, late = (statistics.median(times[i * third : (i + 1) * third]) for i in range(3))
    if not (middle > 1.08 * early and late > 1.08 * middle and late > (1.25 if min(first, second) > 200 else 1.6) * early):
        return
    upper = statistics.fmean(times) / statistics.fmean(times[:third])
    lines = [
        f"the process grows by {second / 1e3:.2g} kB with every step and does not stop" if min(first, second) > 200 else "",
        f"a step took {milliseconds(early)} in the first third of what was seen and {milliseconds(late)} in the last",
    ]
    edit = "keep numbers, not tensors with their graphs: losses.append(loss.detach()) or loss.item()"
    tries = [by_edit(edit, 1.0, max(upper, late / early), "nothing of an old step stays alive, or is gone through again")]
    yield cause(Bottleneck.MEMORY_GROWTH, saved(late / early), max(upper, late / early), 0.75, lines, top_line(seen, "rest"), tries)
