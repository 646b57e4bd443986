"""One trial: the baseline is found or recorded, the variant is tried against it, and there is a verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any
from typing import Protocol as Interface

import torch

from perftrain.compare.channel import Worker, WorkerFailed
from perftrain.compare.duet import ASIDE_SHARE, BASELINE, QUIET_CORES, VARIANT, Timing, VariantFailed, time_arms
from perftrain.compare.job import Job
from perftrain.compare.parity import judge
from perftrain.compare.verdict import changes_result, decide, does_not_run, settings_of
from perftrain.data.scratch import VARIABLE as SCRATCH
from perftrain.data.scratch import shared_scratch
from perftrain.engine.assemble import make_plan
from perftrain.engine.checks import NotAvailable, check_switches
from perftrain.facts import Decision, Numerics, Parity, Progress, RunRecord, StepRow, Verdict, progress_from, run_record_from
from perftrain.fingerprint import fingerprint

Update = Callable[[float, str], None]


class Watcher(Interface):
    """Shows progress. The command line draws bars; tests and libraries give :class:`Silent`."""

    def progress(self, description: str, total: float) -> AbstractContextManager[Update]: ...
    def training(self, description: str) -> AbstractContextManager[Callable[[Progress], None]]: ...
    def say(self, line: str) -> None: ...


class ProgramFailed(Exception):
    """The program under test fails without any switch. ``traceback`` is its own, unshortened."""

    def __init__(self, message: str, traceback: str) -> None:
        super().__init__(message)
        self.traceback = traceback


@dataclass(frozen=True)
class Baseline:
    record: RunRecord
    found: bool
    """It was on disk already."""


# --- baseline ---
def ensure_baseline(job: Job, parts: Mapping[str, Any], watcher: Watcher) -> Baseline:
    """The baseline of this fingerprint: found, or recorded now. Two processes that need it at once record it once.

    Raises:
        ProgramFailed: the program fails.
        KeyboardInterrupt: stopped; what was measured is kept, marked as interrupted.
    """
    print_ = fingerprint(parts)
    found = job.store.baseline(print_)
    if found is not None:
        return Baseline(found, True)
    with job.store.lock(f"baseline-{print_[:16]}", on_wait=lambda holder: watcher.say(f"Waiting: {holder} records this baseline.")):
        found = job.store.baseline(print_)
        if found is not None:
            return Baseline(found, True)
        return Baseline(_record_baseline(job, parts, print_, watcher), False)


def baseline_id(job: Job, print_: str) -> str:
    return f"baseline-{job.recipe_name}-{print_[:8]}"


def _record_baseline(job: Job, parts: Mapping[str, Any], print_: str, watcher: Watcher) -> RunRecord:
    steps = int(job.recipe["steps"])
    protocol = job.protocol
    if (job.store.root / baseline_id(job, print_)).exists():
        job.store.load(baseline_id(job, print_))  # newer than this version, or broken: say so before training, not after
    with Worker(job.with_opts([]).spec(), {"PYTHONHASHSEED": "0"}) as worker:
        try:
            losses: dict[str, list[float]] = {}
            first: dict[str, Any] = {}
            with watcher.progress("Baseline: losses by seed", protocol.parity_steps * protocol.parity_seeds) as update:
                for number in range(protocol.parity_seeds):
                    seed = protocol.seed + number
                    answer = worker.call(
                        "parity",
                        arm=BASELINE,
                        seed=seed,
                        steps=protocol.parity_steps,
                        on_progress=lambda at, done=number: update(done * protocol.parity_steps + at["step"], f"seed {done + 1}"),
                    )
                    if "not_finite" in answer:
                        raise ProgramFailed(answer["not_finite"], f"{answer['not_finite']} That is the program as it stands.")
                    losses[str(seed)] = answer["losses"]
                    first = first or answer
            with watcher.training("Baseline: training") as show:
                answer = _trained(worker, BASELINE, protocol.seed, steps, show)
            peaks = worker.call("peaks") if answer["failure"] is None else {}
        except WorkerFailed as failure:
            raise ProgramFailed(str(failure), failure.traceback) from None
        for line in notable(worker.log()):
            watcher.say(line)
    record = replace(
        run_record_from(answer["run"]),
        run_id=baseline_id(job, print_),
        role="baseline",
        workload={"name": job.recipe_name, **parts["workload"], **answer["run"]["workload"]},
        fingerprint=print_,
        settings={},
        environment={k: parts[k] for k in ("software", "settings", "code")},
        machine={**machine_line(job.device, parts["machine"]), "details": parts["machine"], "peaks": peaks},
        peak_bytes=first["peak_bytes"],
        warmup_s=first["warmup_s"],
        parity_losses=losses,
    )
    if record.status == "interrupted":
        record = replace(record, run_id=f"{record.run_id}-interrupted-{int(time.time())}")
        job.store.save(record, _rows(answer["rows"]))
        watcher.say(f"Interrupted: {record.breakdown.steps} steps are kept in {job.store.root / record.run_id}.")
        raise KeyboardInterrupt
    if answer["failure"] is not None:
        record = replace(record, run_id=f"{record.run_id}-failed-{int(time.time())}")
        job.store.save(record, _rows(answer["rows"]))
        raise ProgramFailed(answer["failure"]["message"], answer["failure"]["traceback"])
    job.store.save(record, _rows(answer["rows"]))
    return record


def machine_line(device: str, machine: Mapping[str, Any]) -> dict[str, Any]:
    """The few facts about the machine that people want beside every result."""
    gpus = [gpu.get("name", "GPU") for gpu in machine.get("gpus") or []]
    facts = {
        "device": device,
        "cpu": machine.get("cpu_model"),
        "cores": machine.get("cores_usable"),
        "memory_bytes": machine.get("memory_bytes"),
    }
    return {**facts, **({"gpu": f"{len(gpus)} × {gpus[0]}"} if gpus else {})}


def _trained(worker: Worker, arm: str, seed: int, steps: int, show: Callable[[Progress], None]) -> dict[str, Any]:
    try:
        return worker.call("train", arm=arm, seed=seed, steps=steps, on_progress=lambda at: show(progress_from(at)))
    except KeyboardInterrupt:
        worker.interrupt()
        try:
            return worker.answer()
        except WorkerFailed:  # it was not training yet, or not any more: there is nothing to keep
            raise KeyboardInterrupt from None


def _rows(raw: Sequence[Mapping[str, Any]]) -> list[StepRow]:
    return [StepRow(**row) for row in raw]


def notable(log: str) -> list[str]:
    """What the data side said on purpose (skipped files): its lines start with the package's name."""
    return [line for line in dict.fromkeys(log.splitlines()) if line.startswith("perftrain")]


# --- variant ---
def refuse_conflicts(job: Job) -> None:
    """Raise PerftrainError for switches that exclude each other, before anything is trained. What cannot run here is a verdict."""
    with suppress(NotAvailable):
        check_switches(job.all_switches(), make_plan(job.all_switches(), torch.device(job.device)))


def try_switches(job: Job, parts: Mapping[str, Any], baseline: RunRecord, watcher: Watcher) -> Verdict:
    """The verdict on ``job.opts``. Whatever goes wrong with the variant is a verdict too.

    Raises:
        PerftrainError: switches that conflict, a setting out of range.
        ProgramFailed: the program fails without the switches.
        KeyboardInterrupt: before there was anything to report.
    """
    begin = time.monotonic()
    switches = job.switches()
    names = [s.card.name for s in switches]
    plan = make_plan(job.all_switches(), torch.device(job.device))
    facts: dict[str, Any] = {"settings": settings_of(job.opts), "fingerprint": baseline.fingerprint}
    try:
        check_switches(job.all_switches(), plan)
    except NotAvailable as error:
        return does_not_run(names, str(error), **facts)
    environments, notes = job.environments(switches)
    facts["notes"] = (*notes, *(line for s in switches if (line := s.describe(plan))))
    numerics = weakest(s.card.numerics for s in job.all_switches())
    with shared_scratch() as cache:  # so that compiling and caching cost what they cost the first time
        for variables in environments.values():
            variables.update({"TORCHINDUCTOR_CACHE_DIR": cache, SCRATCH: cache})
        return _measured(job, names, numerics, environments, baseline, watcher, {**facts, "begin": begin})


def _measured(
    job: Job,
    names: list[str],
    numerics: Numerics,
    environments: Mapping[str, Mapping[str, str]],
    baseline: RunRecord,
    watcher: Watcher,
    facts: dict[str, Any],
) -> Verdict:
    begin = facts.pop("begin")
    try:
        alone = _alone(job, environments[VARIANT], watcher, " + ".join(names))
        parity = _parity(job, numerics, alone, baseline)
        facts["notes"] = (*facts["notes"], *alone.get("notes", ()))
        if "not_finite" in alone:
            return changes_result(
                names, f"{alone['not_finite']} The baseline's stayed finite.", parity, seconds=time.monotonic() - begin, **facts
            )
        with watcher.progress(f"Measuring {' + '.join(names)} against the baseline", job.protocol.budget_s) as update:
            timing = time_arms(job.spec(), environments, job.protocol, update)
    except VariantFailed as error:
        return _broken(names, error.failure, time.monotonic() - begin, facts)
    except WorkerFailed as failure:
        raise ProgramFailed(str(failure), failure.traceback) from None
    return _judged(names, timing, parity, baseline, alone, job, {**facts, "seconds": time.monotonic() - begin})


def _judged(
    names: list[str],
    timing: Timing,
    parity: Parity,
    baseline: RunRecord,
    alone: Mapping[str, Any],
    job: Job,
    facts: dict[str, Any],
) -> Verdict:
    if timing.rounds() < 4:
        if timing.interrupted:
            raise KeyboardInterrupt
        budget_s = job.protocol.budget_s
        found = f"only {timing.rounds()} rounds fitted into {budget_s:.0f} s; give it more: --budget {4 * budget_s:.0f}"
        return Verdict(tuple(names), Decision.NOT_RESOLVED, found, parity=parity, **facts)
    before = timing.summary(BASELINE, baseline.peak_bytes, baseline.warmup_s)
    after = timing.summary(VARIANT, alone["peak_bytes"], alone["warmup_s"])
    verdict = decide(names, timing.estimate(), parity, before, after, job.protocol, timing.disturbed(), **facts)
    if timing.chooses() and timing.disturbed_share() > ASIDE_SHARE:
        aside = f"other programs were busy during {timing.disturbed_share():.0%} of the turns, which were set aside"
        verdict = replace(verdict, notes=(*verdict.notes, aside))
    elif timing.other_cores > QUIET_CORES:
        busy = f"other programs kept {timing.other_cores:.1f} cores busy meanwhile: measure on a quiet machine for a narrower interval"
        verdict = replace(verdict, notes=(*verdict.notes, busy))
    if timing.interrupted:
        verdict = replace(verdict, notes=(*verdict.notes, "interrupted: only the rounds until then are counted"))
    return verdict


def _alone(job: Job, environment: Mapping[str, str], watcher: Watcher, label: str) -> dict[str, Any]:
    """The variant by itself in a fresh process: its losses, its peak of memory, what starting it costs."""
    protocol = job.protocol
    try:
        with Worker(job.spec(), environment) as worker, watcher.progress(f"{label}: losses", protocol.parity_steps) as update:
            return worker.call(
                "parity",
                arm=VARIANT,
                seed=protocol.seed,
                steps=protocol.parity_steps,
                on_progress=lambda at: update(at["step"], f"step {at['step']}"),
            )
    except WorkerFailed as failure:
        raise VariantFailed(failure) from failure


def _parity(job: Job, numerics: Numerics, alone: Mapping[str, Any], baseline: RunRecord) -> Parity:
    """Judge the losses; where bits differ that should not, ask first whether the program repeats itself at all."""
    losses = baseline.parity_losses
    parity = judge(numerics, alone["losses"], losses)
    if numerics is not Numerics.EXACT or parity.holds or not alone["losses"]:
        return parity
    with Worker(job.with_opts([]).spec(), {"PYTHONHASHSEED": "0"}) as worker:
        repeat = worker.call("parity", arm=BASELINE, seed=job.protocol.seed, steps=job.protocol.parity_steps)
    return judge(numerics, alone["losses"], losses, repeat["losses"])


def _broken(names: list[str], failure: WorkerFailed, seconds: float, facts: dict[str, Any]) -> Verdict:
    if failure.facts.get("not_finite"):
        return changes_result(names, str(failure), None, seconds=seconds, **facts)
    if failure.facts.get("out_of_memory"):
        return does_not_run(names, f"out of memory: {failure}", seconds=seconds, **facts)
    own_words = failure.facts.get("type") == "PerftrainError"
    return does_not_run(names, str(failure.facts["message"]) if own_words else str(failure), seconds=seconds, **facts)


def weakest(numerics: Any) -> Numerics:
    """A bundle promises what its loosest member does."""
    order = (Numerics.EXACT, Numerics.CLOSE, Numerics.CHANGED)
    return max(numerics, key=order.index)
