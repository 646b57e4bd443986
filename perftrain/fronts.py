"""What the closed loop tunes: a script through its seams, or a recipe through its switches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from perftrain.compare.duet import Protocol
from perftrain.compare.job import Job, key_of
from perftrain.compare.script import NOTHING, Asked, sort_switches, try_on_script
from perftrain.compare.trial import Watcher, try_switches
from perftrain.cores import usable_cores
from perftrain.diagnosed import Telling, diagnose_program
from perftrain.engine.assemble import make_plan
from perftrain.engine.checks import check_switches
from perftrain.facts import Cause, Diagnosis, PerftrainError, RunRecord, Try, Verdict
from perftrain.measured import candidates, with_bottlenecks
from perftrain.opt import all_switches
from perftrain.report.jsonfile import verdict_from_json, verdict_json, write_json
from perftrain.tune.search import Switches

MOST_WORKERS = 16


def more_workers(switch: str) -> Sequence[str]:
    """The same switch with twice and four times as many workers."""
    name, _, value = switch.partition("=")
    now = int(value or max(2, usable_cores()))
    return [f"{name}={n}" for n in (now * 2, now * 4) if n <= MOST_WORKERS] if name == "workers" else []


class ScriptFront:
    """A script as the closed loop sees it. Verdicts are kept on disk, so that a stopped loop goes on where it was."""

    def __init__(self, program: Sequence[str], protocol: Protocol, diagnosis_s: float, ledger: Path, tell: Telling) -> None:
        self.program, self.protocol, self.diagnosis_s, self.tell = program, protocol, diagnosis_s, tell
        self.ledger = ledger
        self.known: dict[str, Any] = json.loads(ledger.read_text()) if ledger.exists() else {}
        self.reused = 0
        self.device = "cpu"
        """Where the program trains, as the last diagnosis saw it."""

    def diagnose(self, kept: Switches) -> Diagnosis:
        self.tell.forget()
        diagnosis, seen, _ = diagnose_program(self.program, self.diagnosis_s, self.tell, base=self._asked(kept))
        self.device = seen.process["device"]
        return diagnosis

    def compare(self, base: Switches, more: Switches) -> Verdict:
        key = f"{'+'.join(base)} | {'+'.join(more)}"
        if key in self.known:
            self.reused += 1
            return verdict_from_json(self.known[key])
        self.tell.forget()
        verdict = try_on_script(self.program, self._asked(more), self.protocol, self.tell, self._asked(base))
        self.known[key] = verdict_json(verdict)
        self.ledger.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.ledger, self.known)
        return verdict

    def refuse(self, switch: str, kept: Switches) -> str:
        try:
            asked = self._asked((switch,))
        except PerftrainError as error:
            return str(error)
        on = {k.partition("=")[0] for k in kept}
        return f"{switch} is on already" if set(asked.names) & on else ""

    def neighbours(self, switch: str) -> Sequence[str]:
        return more_workers(switch)

    def _asked(self, switches: Switches) -> Asked:
        return sort_switches(switches, usable_cores()) if switches else NOTHING


class RecipeFront:
    """A recipe as the closed loop sees it: any switch of the catalogue that fits. Verdicts are kept in the store."""

    NUMBERS = {"workers": "num_workers", "prefetch": "factor", "threads": "intra_op"}  # noqa: RUF012
    RENAMED = {"no_gc": "gc"}  # noqa: RUF012

    def __init__(
        self, job: Job, baseline: RunRecord, overrides: Sequence[str], diagnosis_s: float, watcher: Watcher, tell: Telling
    ) -> None:
        self.job, self.baseline, self.overrides = job, baseline, tuple(overrides)
        self.diagnosis_s, self.watcher, self.tell = diagnosis_s, watcher, tell
        self.parts = job.parts()
        self.device = job.device

    def diagnose(self, kept: Switches) -> Diagnosis:
        self.tell.forget()
        words = [*self.overrides]
        if kept:
            words.append(f"+opt=[{','.join(k.partition('=')[0] for k in kept)}]")
            words += [f"opt.{n}.{self.NUMBERS[n]}={v}" for n, _, v in (k.partition("=") for k in kept) if v]
        program = ("-m", "perftrain.recipe_program", *words)
        found = diagnose_program(program, self.diagnosis_s, self.tell, quiet=True)[0]
        on = [k.partition("=")[0] for k in kept]
        others = candidates(found.breakdown, on, self.job.device, self.baseline.workload)
        return replace(found, causes=tuple(self._with_catalogue(c, others, found.healthy) for c in found.causes))

    def _with_catalogue(self, cause: Cause, others: Any, healthy: bool) -> Cause:
        """The causes' own advice, and what else of the catalogue relieves them."""
        tries = [replace(t, switch=self.RENAMED.get(t.switch, t.switch)) for t in cause.tries]
        named = {t.switch.partition("=")[0] for t in tries}
        for name, (card, gain) in others.items() if not healthy else ():
            if cause.label in card.relieves and name not in named and gain.high > 1.02:
                tries.append(Try((min(gain.low, cause.upper_bound), min(gain.high, cause.upper_bound)), gain.because, switch=name))
        return replace(cause, tries=tuple(tries))

    def compare(self, base: Switches, more: Switches) -> Verdict:
        job = replace(self.job, base=tuple(map(self._node, base)), opts=tuple(map(self._node, more)))
        key = key_of(job, self.parts)
        known = job.store.verdict(key)
        if known is not None:
            return verdict_from_json(known["verdict"])
        verdict = with_bottlenecks(try_switches(job, self.parts, self.baseline, self.watcher), self.baseline)
        job.store.save_verdict({"verdict": verdict_json(verdict)}, key)
        return verdict

    def refuse(self, switch: str, kept: Switches) -> str:
        name = switch.partition("=")[0]
        if name not in all_switches():
            return f"{name} takes something out of a script; a recipe has nothing of the kind"
        plan = make_plan([], torch.device(self.device))
        made = all_switches()[name]()
        if why := made.unavailable(plan) or made.unfit(self.baseline.workload):
            return why
        try:
            job = replace(self.job, base=tuple(map(self._node, kept)), opts=(self._node(switch),))
            check_switches(job.all_switches(), plan)
        except PerftrainError as error:
            return str(error)
        return ""

    def neighbours(self, switch: str) -> Sequence[str]:
        return more_workers(switch)

    def _node(self, switch: str) -> dict[str, Any]:
        name, _, value = switch.partition("=")
        made = all_switches()[name](**({self.NUMBERS[name]: int(value)} if value else {}))
        return {"_target_": f"{type(made).__module__}.{type(made).__name__}", **vars(made)}
