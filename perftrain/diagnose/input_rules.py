"""Rules on where batches come from: storage, decoding, workers, collating, padding."""

from __future__ import annotations

from collections.abc import Iterator

from perftrain.diagnose.device_rules import idle_for_data
from perftrain.diagnose.finding import NOTABLE, bound, by_edit, by_switch, cause, milliseconds, saved, top_evidence, top_line
from perftrain.diagnose.seen import Sample, Seen
from perftrain.facts import Bottleneck, Cause, Evidence

CHEAP_SAMPLE_S = 60e-6
"""A sample that takes less CPU time than this is not decoded, only picked."""
IMAGES = ("PIL", "cv2", "torchvision", "skimage", "imageio")
DECODERS = (*IMAGES, "av/", "librosa", "soundfile", "torchaudio", "gzip", "zlib", "lzma", "json", "pandas", "pyarrow", "h5py")
LIBRARIES = {"images": IMAGES, "packed": ("gzip", "zlib", "lzma", "bz2", "zipfile", "npyio", "h5py")}
ADVICE = {
    "images": "decode at the size that the model needs (PIL: Image.draft before convert), or shrink the files once beforehand",
    "packed": "keep the files unpacked (numpy.savez instead of savez_compressed, a memory map): unpacking is what takes the time",
}
MOST_WORKERS = 16


def input_causes(seen: Seen) -> Iterator[Cause]:
    if seen.fetching["batches"] >= 2 and (seen.share("data_wait") > 0.05 or without_loading(seen) > NOTABLE):
        yield from _loader(seen)
    elif seen.fetching["batches"] < 2 and bound(_waited(seen)) > NOTABLE:
        yield _waiting(seen)
    if found := _padding(seen):
        yield found


# --- a DataLoader ---
def without_loading(seen: Seen) -> float:
    """How many times as fast the program is with its batches at hand and its workers stopped; 1 if that was not measured."""
    probe = seen.probes.get("cached_batches")
    return probe.speedup if probe is not None and probe.blocks and not probe.error else 1.0


def _loader(seen: Seen) -> Iterator[Cause]:
    restart = _restart_share(seen)
    if bound(restart) > NOTABLE:
        yield _worker_restart(seen, restart)
    share = max(0.0, seen.share("data_wait") - restart)
    if seen.workers:  # workers that take the cores away slow the model down, and nobody waits for a batch
        share = max(share, saved(without_loading(seen)) - restart)
    if bound(share) < NOTABLE:
        return
    sums = seen.fetching
    blocked, cpu = blocked_s(seen), sums["cpu_s"]
    collate, whole = sums["collate_wall_s"], sums["wall_s"] + sums["collate_wall_s"]
    per_sample_cpu = cpu / max(1.0, sums["samples"])
    picked = per_sample_cpu < CHEAP_SAMPLE_S and blocked < 0.3 * whole
    if picked or collate > 0.6 * whole:
        yield _collate(seen, share, per_sample_cpu, collate / max(1e-9, whole))
    elif blocked > 0.5 * whole:
        yield _storage(seen, share, blocked / whole)
    elif workers_gain(seen)[0] > 1.1 and seen.workers == 0:
        yield _workers(seen, share, per_sample_cpu)
    else:
        yield _decode(seen, share, per_sample_cpu)


def _waited(seen: Seen) -> float:
    """Part of the step that waiting for batches costs: where a device's timeline is known, only while the device had nothing to do."""
    idle = idle_for_data(seen)
    return seen.share("data_wait") if idle is None else min(idle, seen.share("data_wait"))


def _waiting(seen: Seen) -> Cause:
    """A loader that could not be looked into (of another library, or of a trace)."""
    share = _waited(seen)
    lines = [
        f"waiting for batches takes {seen.share('data_wait'):.0%} of the step ({milliseconds(seen.phase_s('data_wait'))} of "
        f"{milliseconds(seen.step_s)})",
        f"the device is idle meanwhile for {share:.0%} of the step" if idle_for_data(seen) is not None else "",
        "why could not be seen from here: perftrain diagnose train.py looks into torch's DataLoader",
    ]
    tries = [by_switch("workers", 1.0, bound(share), "if cores are idle meanwhile, batches can be made beside the model")]
    return cause(Bottleneck.INPUT_WORKERS, share, bound(share), 0.5, lines, top_line(seen, "data_wait"), tries)


def blocked_s(seen: Seen) -> float:
    """Seconds that fetching threads neither computed nor queued for a core: they waited for something else."""
    sums = seen.fetching
    return max(0.0, sums["wall_s"] - sums["cpu_s"] - sums["delay_s"])


def workers_gain(seen: Seen) -> tuple[float, int]:
    """(predicted speedup, number of workers) of a loader with enough workers.

    A step then takes the longest of: the rest of the step as it is; one batch from each worker in turn; all CPU time
    on all cores.
    """
    sums = seen.fetching
    batches = max(1.0, sums["batches"])
    wall = (sums["wall_s"] + sums["collate_wall_s"]) / batches
    cpu = (sums["cpu_s"] + sums["collate_cpu_s"]) / batches
    other_s = beside_workers(seen, cpu)
    other_cpu_s = alone(seen)[1]
    best = (1.0, seen.workers)
    for number in range(max(1, seen.workers), MOST_WORKERS + 1):
        wall_alone = max(cpu, wall - sums["delay_s"] / batches)
        step = max(other_s, wall_alone / number, (cpu * 1.05 + other_cpu_s) / max(1, seen.cores))
        if seen.step_s / step > best[0] * 1.02:
            best = (seen.step_s / step, number)
    return best


def beside_workers(seen: Seen, cpu_s: float) -> float:
    """Seconds of a step that has its batch at hand while workers spend ``cpu_s`` on the next one.

    Where torch computes on all cores, a worker that takes one of them stalls the threads on the others too: about twice
    its own time. Where workers run already, what they cost is known: they slow down the part of the step that they overlap.
    """
    quick, cpu_alone = alone(seen)
    slow = seen.step_s - seen.phase_s("data_wait")
    if seen.workers and slow > quick:
        return min(quick + (slow - quick) * seen.step_s / slow, quick + 4 * cpu_s)
    crowded = cpu_alone > 0.8 * seen.cores * quick
    return quick + 2 * cpu_s if crowded else quick


def alone(seen: Seen) -> tuple[float, float]:
    """(seconds, CPU seconds) of a step that has its batch at hand: measured with cached batches, or what is left without the wait."""
    other_s = seen.step_s - seen.phase_s("data_wait")
    other_cpu_s = max(0.0, seen.process_cpu_s - seen.phase_s("data_wait", 2))
    probe = seen.probes.get("cached_batches")
    if probe is not None and probe.blocks and not probe.error and other_s > 0:
        quick = min(other_s, seen.step_s / probe.speedup)
        return quick, other_cpu_s * quick / other_s
    return other_s, other_cpu_s


def _storage(seen: Seen, share: float, blocked_share: float) -> Cause:
    sums = seen.fetching
    gain, number = workers_gain(seen)
    per_sample = blocked_s(seen) / max(1.0, sums["samples"])
    lines: list[str | Evidence] = [
        f"waiting for batches takes {share:.0%} of the step ({milliseconds(seen.phase_s('data_wait'))} of {milliseconds(seen.step_s)})",
        f"{blocked_share:.0%} of the time to make a batch is neither computing nor queueing for a core: "
        f"{milliseconds(per_sample)} a sample "
        "waiting for storage or the network",
        _read(seen),
        *(top_evidence(seen, "worker") or top_evidence(seen, "data_wait")),
    ]
    tries = [by_switch("workers", max(1.02, 0.85 * gain), 1.1 * gain, f"{number} workers wait at the same time, not one after the other")]
    if seen.workers:
        tries[0] = by_switch(
            "workers", max(1.02, 0.85 * gain), 1.1 * gain, f"num_workers={number} instead of {seen.workers}: the waiting overlaps"
        )
    if gain < 1.05:
        tries = []
    tries.append(
        by_edit("copy the files to a local disk once, if files are what is waited for", 1.0, bound(share), "a local disk has no such wait")
    )
    return cause(
        Bottleneck.INPUT_STORAGE, share, max(gain, 1.0) if gain > 1.1 else bound(share * blocked_share), 0.9, lines,
        top_line(seen, "worker") or top_line(seen, "data_wait"), tries,
    )  # fmt: skip


def _read(seen: Seen) -> str:
    """What was read meanwhile, where the system tells."""
    sums = seen.fetching
    if not sums.get("read_bytes"):
        return ""
    batches = max(1.0, sums["batches"])
    parts = []
    if sums["read_bytes"] / batches > 2**10:
        parts.append(f"{sums['read_bytes'] / batches / 2**20:.3g} MiB a batch were read from files")
        parts.append(f"{min(sums['read_bytes'], sums.get('disk_bytes', 0.0)) / batches / 2**20:.3g} MiB of it from the disk itself")
    received = seen.process["fetching"].get("received_bytes", 0.0) / max(1, len(seen.process["rows"]))
    if received > 2**16:
        parts.append(f"the machine received {received / 2**20:.3g} MiB a step from the network")
    return ", ".join(parts)


def _workers(seen: Seen, share: float, per_sample_cpu: float) -> Cause:
    gain, number = workers_gain(seen)
    busy = seen.process_cpu_s / max(1e-9, seen.step_s)
    lines: list[str | Evidence] = [
        f"batches are made in the training process, which waits {share:.0%} of the step for them",
        f"a sample takes {milliseconds(per_sample_cpu)} of CPU time; {busy:.1f} of {seen.cores} cores are busy",
        *top_evidence(seen, "data_wait"),
    ]
    tries = [by_switch("workers", max(1.02, 0.8 * gain), gain, f"{number} workers make batches while the model computes")]
    return cause(Bottleneck.INPUT_WORKERS, share, gain, 0.8, lines, top_line(seen, "data_wait"), tries)


def _decode(seen: Seen, share: float, per_sample_cpu: float) -> Cause:
    where = top_line(seen, "worker") or top_line(seen, "data_wait")
    sums = seen.fetching
    batches = max(1.0, sums["batches"])
    cpu = (sums["cpu_s"] + sums["collate_cpu_s"]) / batches
    other, other_cpu = alone(seen)
    # decoding at the size that is needed costs about two fifths (measured on photographs of several megapixels)
    cheaper = seen.step_s / max(other, (0.4 * cpu + other_cpu) / max(1, seen.cores) if seen.workers else other + 0.4 * cpu)
    cheaper = min(cheaper, bound(share))
    lines: list[str | Evidence] = [
        f"waiting for batches takes {share:.0%} of the step, with {seen.workers} workers on {seen.cores} cores",
        f"a sample takes {milliseconds(per_sample_cpu)} of CPU time; making one batch takes {milliseconds(cpu)} of it",
        *(top_evidence(seen, "worker") or top_evidence(seen, "data_wait")),
    ]
    if workers_gain(seen)[0] < 1.1:
        lines.append("more workers have no core to run on")
    tries = [by_edit(_cheaper(seen), 0.7 * cheaper, cheaper, "the samples cost less CPU time")]
    return cause(Bottleneck.INPUT_DECODE, share, cheaper, 0.85, lines, where, tries)


def _making(seen: Seen) -> list[Sample]:
    """Where batches are made: in the workers, or else while the training waits."""
    return seen.worker_samples or [s for s in seen.samples if s.phase == "data_wait"]


def _cheaper(seen: Seen) -> str:
    """What makes a sample cost less, by the library in which its time goes."""
    rows = _making(seen)
    spent = {
        kind: sum(r.seconds for r in rows if any(w in r.library or w in r.leaf[0] for w in words)) for kind, words in LIBRARIES.items()
    }
    kind = max(spent, key=lambda k: spent[k])
    if spent[kind] < 0.3 * sum(r.seconds for r in rows):
        return "make what this line makes once beforehand and keep it (numpy.save, a memory map), or in fewer, larger operations"
    return ADVICE[kind]


def _collate(seen: Seen, share: float, per_sample_cpu: float, collate_part: float) -> Cause:
    upper = bound(share * 0.9)
    lines: list[str | Evidence] = [
        f"waiting for batches takes {share:.0%} of the step, though a sample takes only {1e6 * per_sample_cpu:.3g} us of CPU time",
        f"a batch is picked together from {seen.samples_per_step:.0f} samples one by one; putting them together is "
        f"{collate_part:.0%} of it",
        *top_evidence(seen, "data_wait"),
    ]
    own = collate_part > 0.6 and _own_collate(seen)
    edit = (
        "make the batch in a few operations on whole arrays (numpy.concatenate, torch.cat, one indexing) instead of a loop over its parts"
        if own
        else "index whole batches: DataLoader(dataset, sampler=BatchSampler(RandomSampler(dataset), batch_size, "
        "drop_last), batch_size=None)"
    )
    tries = [by_edit(edit, 0.75 * upper, upper, "no Python for each sample")]
    return cause(Bottleneck.INPUT_COLLATE, share, upper, 0.85, lines, top_line(seen, "data_wait"), tries)


def _own_collate(seen: Seen) -> bool:
    """The user's own code puts the samples together, not torch's."""
    rows = _making(seen)
    inside = sum(r.seconds for r in rows if r.frames and "collate" in r.frames[0][2])
    return inside > 0.4 * sum(r.seconds for r in rows)


# --- workers that are started again and again ---
def _rebuilt(seen: Seen) -> bool:
    """Whether most epochs have a loader of their own."""
    return seen.count("new_loaders") > 0.5 * seen.count("epochs")


def _restart_wait(seen: Seen) -> float:
    """Part of the step in which the program waits for workers to start, to make their first batch, and to end."""
    if not seen.workers or (seen.loader.get("persistent") and not _rebuilt(seen)) or seen.count("worker_starts") <= 0:
        return 0.0
    lost = sum(seen.count(part, "sums") for part in ("iter_s", "first_batch_s", "last_s"))
    return min(lost / max(1e-9, seen.whole_step_s), seen.share("data_wait"))


def _restart_share(seen: Seen) -> float:
    """The wait, and what starting costs the steps beside it: all that a step takes over one whose workers just go on."""
    wait = _restart_wait(seen)
    if bound(wait) < NOTABLE or without_loading(seen) <= 1.0:
        return wait
    sums, (quick_s, cpu_alone_s) = seen.fetching, alone(seen)
    cpu_s = (sums["cpu_s"] + sums["collate_cpu_s"]) / max(1.0, sums["batches"])
    steady_s = max(quick_s, (1.05 * cpu_s + cpu_alone_s) / max(1, seen.cores))
    return max(wait, 1 - steady_s / seen.step_s)


def _worker_restart(seen: Seen, share: float) -> Cause:
    epochs, wait = seen.count("epochs"), _restart_wait(seen)
    lost = wait * seen.whole_step_s / max(1e-9, epochs)
    lines = [
        f"{seen.workers} workers are started anew every {1 / max(1e-9, epochs):.0f} steps; waiting for them to start and to "
        f"stop takes {milliseconds(lost)} each time, {wait:.0%} of the step",
        f"workers that just went on would save {share:.0%} of it (from the CPU time of a batch and of a step without loading)"
        if share > wait else "",
        "each epoch makes a DataLoader of its own, whose workers are new whatever its arguments" if _rebuilt(seen) else "",
    ]  # fmt: skip
    upper = bound(share * 0.95)
    once = by_edit(
        "make the DataLoader once, before the loop, with persistent_workers=True; what changes from epoch to epoch goes into its sampler",
        0.9 * upper, upper, "the workers live on from epoch to epoch",
    )  # fmt: skip
    kept = by_switch("persistent_workers", 0.9 * upper, upper, "the workers live on from epoch to epoch")
    tries = [once if _rebuilt(seen) else kept]
    return cause(Bottleneck.INPUT_WORKER_RESTART, share, upper, 0.9, lines, top_line(seen, "data_wait"), tries)


# --- padding ---
def _padding(seen: Seen) -> Cause | None:
    inputs = [i for i in seen.trace.get("inputs", []) if i]
    if not inputs:
        return None
    real = sum(i["real_share"] for i in inputs) / len(inputs)
    longest = sum(i["longest_share"] for i in inputs) / len(inputs)
    computing = seen.share("forward", "backward")
    probe = seen.probes.get("short_batches")
    trimmed = probe.speedup if probe and not probe.error else bound(computing * (1 - longest))
    sorted_ = bound(computing * (1 - real))
    upper = max(trimmed, 1.0) if longest < 0.85 else sorted_
    if real > 0.75 or upper < NOTABLE:
        return None
    lines: list[str | Evidence] = [
        f"{real:.0%} of the positions that the model computes on hold data, {1 - real:.0%} are padding (batches of "
        f"{inputs[0]['rows']} × {inputs[0]['width']})",
        f"the longest row of a batch fills {longest:.0%} of its width",
        f"cut to the longest row, in turns with the batches as they are: {probe.speedup:.2f}×" if probe and not probe.error else "",
    ]
    tries = []
    if longest < 0.85:
        tries.append(by_edit("pad each batch to its own longest row, not to a fixed length (collate_fn: "
            "torch.nn.utils.rnn.pad_sequence)", 0.9 * trimmed,
                             1.1 * trimmed, "positions that hold nothing are not computed"))  # fmt: skip
    tries.append(by_switch("length_buckets", 1.0, max(sorted_, trimmed), "batches of samples of like length need hardly any padding"))
    return cause(Bottleneck.PADDING_WASTE, saved(upper), upper, 0.85, lines, "", tries)
