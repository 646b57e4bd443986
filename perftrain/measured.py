"""What the verbs that measure do: baseline, verdict, sweep."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from perftrain.compare.job import Job, find_device, key_of
from perftrain.compare.trial import Baseline, ProgramFailed, Watcher, ensure_baseline, refuse_conflicts, try_switches
from perftrain.compare.verdict import does_not_run, settings_of
from perftrain.diagnose.rules import diagnose_phases
from perftrain.facts import ArmSummary, Card, Diagnosis, Gain, PerftrainError, RunRecord, StepBreakdown, Verdict, ranked
from perftrain.measure import machine
from perftrain.measure.peaks import peaks
from perftrain.opt import all_switches
from perftrain.opt.seams import Plan
from perftrain.options import Line, again
from perftrain.report import terminal
from perftrain.report.jsonfile import diagnosis_json, run_json, verdict_from_json, verdict_json, write_json, write_text
from perftrain.report.markdown import ranking_markdown
from perftrain.store import Store

__all__ = ["ProgramFailed", "doctor_facts", "single", "sweep", "sweep_job"]


# --- from a configuration to a job ---
def job_of(cfg: Any) -> Job:
    """What the configuration asks for; data is made, values are checked.

    Raises:
        PerftrainError: a value of the wrong type or out of range, data that is not there.
    """
    plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    opts = [checked(node, f"opt.{name}") for name, node in (plain.get("opt") or {}).items()]
    for name, node in zip(plain.get("opt") or {}, opts, strict=True):
        build(node, f"opt.{name}")
    protocol = build(plain["measure"], "measure")
    recipe_node = checked(plain["recipe"], "recipe")
    recipe = build(recipe_node, "recipe")
    if hasattr(recipe, "prepare"):
        recipe.prepare()
    name = str(plain["recipe"]["_target_"]).rsplit(".", 1)[-1].lower()
    return Job(name, recipe_node, Store(Path(str(plain["runs"]))), tuple(opts), find_device(str(plain["device"])), protocol)


def build(node: Mapping[str, Any], where: str) -> Any:
    """Instantiate ``_target_``; the user's mistakes come out as such."""
    try:
        return instantiate(checked(node, where))
    except PerftrainError:
        raise
    except Exception as error:
        cause = error.__cause__ or error
        if isinstance(cause, PerftrainError):
            raise cause from None
        if isinstance(cause, ModuleNotFoundError):
            raise PerftrainError(
                f"{where} needs the package {cause.name!r}, which is not installed. Try: pip install 'perftrain[recipes]'"
            ) from None
        if isinstance(cause, TypeError):
            raise PerftrainError(f"{where}: {cause}. --cfg job shows the keys it takes.") from None
        raise


def checked(node: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """``node`` with its values in the types of the dataclass that it names.

    Raises:
        PerftrainError: naming the key, what it takes and what was seen.
    """
    from hydra.utils import get_class

    try:
        cls = get_class(str(node["_target_"]))
    except Exception as error:
        missing = error.__cause__ if isinstance(error.__cause__, ModuleNotFoundError) else None
        hint = "_target_ must name an importable class."
        if missing is not None:
            own = str(node["_target_"]).startswith(f"{missing.name}")
            hint = f"Put the folder of {missing.name} on PYTHONPATH." if own else "Try: pip install 'perftrain[recipes]'"
        raise PerftrainError(f"{where}._target_={node.get('_target_')} cannot be loaded: {missing or error}. {hint}") from None
    if not is_dataclass(cls) or any(isinstance(v, dict) for v in node.values()):
        return node  # a class that checks for itself, and nested nodes do
    try:
        typed = OmegaConf.merge(OmegaConf.structured(cls), {k: v for k, v in node.items() if k != "_target_"})
    except OmegaConfBaseException as error:
        raise PerftrainError(
            f"{where}.{error.full_key}: {str(error).splitlines()[0]}. --cfg job shows the keys and their values."
        ) from None
    values = OmegaConf.to_container(typed)
    assert isinstance(values, dict)
    return {"_target_": node["_target_"], **{str(k): v for k, v in values.items()}}


# --- facts for people ---
def candidates(breakdown: StepBreakdown, on: Sequence[str], device: str, workload: Mapping[str, Any]) -> dict[str, tuple[Card, Gain]]:
    """The switches that run here, have something to act on and are not on yet, with what they promise for this step."""
    plan = Plan(device=torch.device(device))
    found = {}
    for name, cls in all_switches().items():
        switch = cls()
        if name not in on and not switch.unavailable(plan) and not switch.unfit(workload):
            found[name] = (switch.card, switch.predict(breakdown))
    return found


def diagnosed(breakdown: StepBreakdown, on: Sequence[str], baseline: RunRecord) -> Diagnosis:
    """The ruling bottleneck of a step of the baseline's program, with the switches ``on``."""
    device = str(baseline.machine.get("device", "cpu"))
    peaks = baseline.machine.get("peaks") or {}
    return diagnose_phases(breakdown, candidates(breakdown, on, device, baseline.workload), peaks)


def with_bottlenecks(verdict: Verdict, record: RunRecord) -> Verdict:
    """The verdict with the ruling bottleneck of both arms."""

    def named(arm: ArmSummary | None, on: Sequence[str]) -> ArmSummary | None:
        if arm is None or not arm.breakdown.steps:
            return arm
        return replace(arm, bottleneck=str(diagnosed(arm.breakdown, on, record).causes[0].label))

    return replace(verdict, baseline=named(verdict.baseline, ()), variant=named(verdict.variant, verdict.switches))


# --- one run ---
def single(cfg: Any, watcher: Watcher, typed: str) -> int:
    """Train the recipe if its baseline is not known yet; judge the switches if there are any. ``typed``: what does it again."""
    job = job_of(cfg)
    switches = job.switches()
    refuse_conflicts(job)
    parts = job.parts()
    baseline = ensure_baseline(job, parts, watcher)
    console = terminal.stdout_console()
    diagnosis = diagnosed(baseline.record.breakdown, (), baseline.record)
    say_baseline(baseline, job, watcher)
    terminal.print_run(console, baseline.record, diagnosis)
    facts: dict[str, Any] = {"schema": 1, "run": {**run_json(baseline.record), "again": typed}, "diagnosis": diagnosis_json(diagnosis)}
    verdict: Verdict | None = None
    if switches:
        verdict = with_bottlenecks(try_switches(job, parts, baseline.record, watcher), baseline.record)
        facts["verdict"] = verdict_json(verdict)
        if not interrupted(verdict):
            job.store.save_verdict({"verdict": facts["verdict"]}, key_of(job, parts))
        after = diagnosed(verdict.variant.breakdown, verdict.switches, baseline.record) if verdict.variant else None
        console.rule(style="dim")
        terminal.print_verdict(console, verdict, after.causes[0].tries[:3] if after else ())
        facts["verdict"]["again"] = typed
    if cfg.json:
        write_json(cfg.json, facts)
    if verdict is not None and interrupted(verdict):
        raise KeyboardInterrupt
    return 0


def interrupted(verdict: Verdict) -> bool:
    return any(note.startswith("interrupted") for note in verdict.notes)


def say_baseline(baseline: Baseline, job: Job, watcher: Watcher) -> None:
    record = baseline.record
    word = "found" if baseline.found else "recorded"
    watcher.say(f"Baseline {word}: {job.store.root / record.run_id} ({record.started}, {record.breakdown.steps} steady steps)")


# --- a sweep ---
def sweep_dir(root: Path, line: Line) -> Path:
    """The folder of this sweep: the same line finds it again."""
    return root / "sweeps" / hashlib.sha256(json.dumps(sorted(line.overrides)).encode()).hexdigest()[:10]


def sweep(line: Line, composed: Sequence[Any], watcher: Watcher, launch: Callable[[], int]) -> int:
    """Let Hydra run one job for each combination, then rank what they found."""
    for cfg in composed:
        if not cfg.get("opt"):
            raise PerftrainError("A sweep needs switches to compare; a combination has none. Type: python -m perftrain -m +opt=amp,tf32")
    root = Path(str(composed[0].runs))
    folder = sweep_dir(root, line)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("verdict-*.json"):
        old.unlink()
    job = job_of(composed[0])
    say_baseline(ensure_baseline(job, job.parts(), watcher), job, watcher)
    with _environment("PERFTRAIN_SWEEP", str(folder.resolve())):
        code = launch()
    verdicts = ranked([verdict_from_json(json.loads(f.read_text())["verdict"]) for f in sorted(folder.glob("verdict-*.json"))])
    console = terminal.stdout_console()
    console.rule(style="dim")
    terminal.print_ranking(console, verdicts)
    ranking = {"schema": 1, "verdicts": [verdict_json(v) for v in verdicts]}
    write_text(folder / "command.txt", again(line) + "\n")
    write_json(folder / "ranking.json", ranking)
    (folder / "ranking.md").write_text(ranking_markdown(verdicts))
    watcher.say(f"Ranking: {folder / 'ranking.md'} and ranking.json")
    if composed[0].json:
        write_json(composed[0].json, ranking)
    return code


def _environment(name: str, value: str) -> Any:
    from unittest.mock import patch

    return patch.dict("os.environ", {name: value})


def sweep_job(cfg: Any, watcher: Watcher) -> float | None:
    """One arm of a sweep. Whatever goes wrong with it is its verdict; the others go on."""
    import os

    folder = Path(os.environ["PERFTRAIN_SWEEP"])
    opts = OmegaConf.to_container(cfg.opt, resolve=True) if cfg.get("opt") else {}
    assert isinstance(opts, dict)
    names = [str(n) for n in opts]
    try:
        job = job_of(cfg)
        parts = job.parts()
        baseline = ensure_baseline(job, parts, watcher).record
        key = key_of(job, parts)
        known = job.store.verdict(key)
        if known is not None:
            verdict = verdict_from_json(known["verdict"])
            watcher.say(f"{' + '.join(names)}: verdict reused (same workload, machine, software, code and settings)")
        else:
            verdict = with_bottlenecks(try_switches(job, parts, baseline, watcher), baseline)
            if not interrupted(verdict):
                job.store.save_verdict({"verdict": verdict_json(verdict)}, key)
    except PerftrainError as error:
        verdict = does_not_run(names, str(error), settings=settings_of(list(opts.values())))
    write_json(
        folder / f"verdict-{'+'.join(names)}-{hashlib.sha256(repr(opts).encode()).hexdigest()[:6]}.json",
        {"verdict": verdict_json(verdict)},
    )
    console = terminal.stdout_console()
    console.rule(style="dim")
    terminal.print_verdict(console, verdict)
    if interrupted(verdict):
        raise KeyboardInterrupt
    return verdict.ci95[0] if verdict.ci95 else None


# --- doctor ---
def doctor_facts(cfg: Any, watcher: Watcher, only_opts: bool) -> dict[str, Any]:
    """This machine, what is installed, measured peaks, what cannot run and why, and the switches."""
    device = find_device(str(cfg.device))
    plan = Plan(device=torch.device(device))
    opts = []
    for name, cls in all_switches().items():
        reason = cls().unavailable(plan)
        card = cls.card
        opts.append({"name": name, "place": card.place.name.lower(), "relieves": [str(b) for b in card.relieves],
                     "numerics": str(card.numerics), "runs_here": not reason, "reason": reason, "summary": card.summary})  # fmt: skip
    if only_opts:
        return {"opts": opts}
    with watcher.progress("Measuring peaks", 3):
        measured_peaks = peaks(device.split(":")[0])
    return {"machine": machine.describe(), "software": machine.software(), "settings": machine.settings(), "peaks": measured_peaks,
            "limits": machine.limits(), "opts": opts}  # fmt: skip
