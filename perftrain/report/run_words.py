"""What a run and its diagnosis say in plain words: the sentences that terminal and files share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from perftrain.facts import ArmSummary, Cause, Diagnosis, Evidence, RunRecord, Try
from perftrain.report import units

NAME_KEYS = ("name", "recipe", "script")
"""Where a workload's name may stand."""
ONLY_FOR_SWITCHES = ("blocks", "linears_by_16", "image_files")
"""Facts that switches ask for and that tell a reader nothing."""
TOLD_AS_ZERO = ("seed", "workers")
"""What is worth a word when it is 0; of anything else there just is none."""


def samples_per_s(arm: ArmSummary | RunRecord | None) -> float | None:
    if arm is None:
        return None
    now = arm.breakdown
    return units.rate(now.samples, now.steps * now.step_s)


def workload_name(record: RunRecord) -> str:
    named = (record.workload.get(key) for key in NAME_KEYS)
    return units.one_line(next(filter(None, named), units.UNKNOWN))


def workload_line(record: RunRecord) -> str:
    """What ran: "resnet18 · parameters 11,181,642 · batch size 64 · seed 0"."""
    name = workload_name(record)
    told = {k: v for k, v in record.workload.items() if k not in (*NAME_KEYS, *ONLY_FOR_SWITCHES) and units.brief(v)}
    told = {k: v for k, v in told.items() if v or k in TOLD_AS_ZERO}
    parts = [f"{units.label(k)} {units.fact(k, v)}" for k, v in told.items()]
    return " · ".join(([] if name == units.UNKNOWN and parts else [name]) + parts)


def place_line(record: RunRecord) -> str:
    """Where it ran: the machine in short, and the version of torch."""
    parts = [f"{units.label(k)} {units.fact(k, v)}" for k, v in record.machine.items() if units.brief(v)]
    software = record.environment.get("software")
    torch = (software if isinstance(software, Mapping) else record.environment).get("torch")
    return " · ".join(parts + ([f"torch {units.one_line(torch)}"] if torch else []))


def figures(record: RunRecord) -> Iterator[tuple[str, str]]:
    """The numbers of a run beside its phases."""
    yield "throughput", f"{units.three(samples_per_s(record))} samples/s"
    for name, value in record.metrics.items():
        yield units.label(name), units.fact(name, value)
    yield "memory peak", units.size(record.peak_bytes)
    yield "warm-up", units.seconds(record.warmup_s)
    if record.seconds:
        yield "whole run", units.seconds(record.seconds)


def cause_line(cause: Cause) -> str:
    """As "input.decode · 38.2 % of the step · at most 1.61× if it vanished · train.py:57"."""
    parts = [cause.label.value, f"{units.share(cause.share)} of the step", f"{ceiling(cause)} if it vanished"]
    return " · ".join(parts + ([units.one_line(cause.where)] if cause.where else []))


def evidence(seen: Evidence) -> str:
    return units.one_line(seen.line) + (f" ({units.one_line(seen.where)})" if seen.where else "")


def behind(diagnosis: Diagnosis, most: int = 3) -> str:
    """The causes after the ruling one: "compute.precision (21.0 %, at most 1.27×)"."""
    return ", ".join(f"{cause.label} ({units.share(cause.share)}, {ceiling(cause)})" for cause in diagnosis.causes[1 : 1 + most])


def ceiling(cause: Cause) -> str:
    """The measured bound of the gain, if the cause vanished altogether."""
    return f"at most {units.factor(cause.upper_bound)}"


def remedy(attempt: Try) -> str:
    return units.one_line(attempt.switch) or f"by hand: {units.one_line(attempt.edit)}"
