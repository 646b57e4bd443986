"""A verdict about switches on somebody's own script: the same question, asked through the seams that can be reached from outside.

What can be switched between two steps takes turns within one process, in several fresh ones. What must stand before the
program starts (the loader's arguments, variables of the environment) is compared in pairs of fresh runs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from perftrain.attach.launch import Watched, folder_of, watch
from perftrain.attach.orders import Orders
from perftrain.attach.probes import ARMS
from perftrain.compare.duet import Protocol
from perftrain.compare.parity import judge
from perftrain.compare.verdict import decide, does_not_run
from perftrain.diagnose.probe import ASIDE, ratios_of
from perftrain.diagnose.seen import Seen
from perftrain.facts import ArmSummary, Numerics, Parity, PerftrainError, Place, StepBreakdown, Verdict
from perftrain.measure.statistics import estimate
from perftrain.opt import all_switches

Tell = Callable[[str, float, float], None]
Measured = tuple[list[list[float]], list[StepBreakdown], str]
"""Log ratios by process or pair, the steps of both arms, and why it could not be measured."""
EXACT = ("no_gc", "anomaly_off", "pin_memory", "prefetch")
ONLY_HERE = ("anomaly_off", "checkpointing_off", "no_gc", "no_sync", "deterministic_off")
"""Arms that take something out of a script; a recipe has nothing of the kind."""
PARITY_STEPS = 30
OTHER_STREAM = 1.5
"""Random augmentation in worker processes draws from other streams: a fourth seed, in effect, which may lie somewhat further off
than the three that the envelope is made of."""
START_LIMIT_S = 300.0


@dataclass(frozen=True)
class Asked:
    """What a list of switches comes to on a script."""

    names: tuple[str, ...]
    arms: tuple[str, ...]
    loader: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    threads: int = 0

    @property
    def whole_runs(self) -> bool:
        return bool(self.loader or self.environment or self.threads)

    def orders(self, base: Orders) -> Orders:
        """``base`` with the switches on for the whole run."""
        return replace(base, loader=dict(self.loader), always=self.arms, threads=self.threads)

    def with_(self, more: Asked) -> Asked:
        """Both together."""
        return Asked(
            (*self.names, *more.names), (*self.arms, *more.arms), {**self.loader, **more.loader},
            {**self.environment, **more.environment}, more.threads or self.threads,
        )  # fmt: skip

    @property
    def numerics(self) -> Numerics:
        return Numerics.EXACT if all(n in EXACT for n in self.names) else Numerics.CLOSE


NOTHING = Asked((), ())
REPLACES = {
    Place.DATASET: "it changes how the dataset makes a sample",
    Place.LOADER: "it changes which samples make a batch",
    Place.LOADER_ENGINE: "it puts another loader in the place of the script's",
    Place.PREFETCH: "it goes around the script's loader",
    Place.EDIT: "it puts other layers into the model",
    Place.CHECKPOINTING: "it wraps blocks of the model before the optimizer is made",
    Place.DATA_PARALLEL: "the script itself must start ranks and share out its samples",
    Place.OPTIMIZER: "it puts another optimizer in the place of the script's",
}


class NotFromOutside(PerftrainError):
    """A switch that only an edit of the script can turn on."""

    def __init__(self, name: str) -> None:
        self.card = all_switches()[name].card
        why = REPLACES.get(self.card.place, "it takes part in the step, which is the script's own code")
        super().__init__(f"{name} cannot be put into a script from outside: {why}. From outside work: {', '.join(possible())}.")


def sort_switches(words: Sequence[str], cores: int) -> Asked:
    """``amp``, ``workers=4``: what each can do to a script from outside.

    Raises:
        PerftrainError: a switch that does not exist, or one that needs the script to be edited.
    """
    arms, loader, environment, names = [], {}, {}, []
    threads = 0
    for word in words:
        name, _, value = word.partition("=")
        names.append(name)
        if value and not (name in ("workers", "prefetch", "threads") and value.isdigit()):
            raise PerftrainError(f"Only workers, prefetch and threads take a value here, a whole number; seen: {word!r}. Type workers=4.")
        if name == "threads":
            threads = int(value) if value else cores
        elif name in ARMS:
            arms.append(name)
        elif name in ("workers", "prefetch"):
            key = {"workers": "num_workers", "prefetch": "prefetch_factor"}[name]
            loader[key] = int(value) if value else (max(2, cores) if name == "workers" else 4)
            loader |= {"persistent_workers": True} if name == "workers" else {}
        elif name in ("persistent_workers", "pin_memory", "in_order"):
            loader[name] = name != "in_order"  # the switch turns the order off
        elif name in all_switches():
            found = dict(all_switches()[name]().environment())
            if not found:
                raise NotFromOutside(name)
            environment |= found
        else:
            raise PerftrainError(f"There is no switch {name!r} for scripts. There are: {', '.join(possible())}.")
    return Asked(tuple(names), tuple(arms), loader, environment, threads)


def possible() -> list[str]:
    counterfactual = ("cached_batches", "short_batches", "no_communication", "unused_gradients_off")
    fixed = [n for n, cls in all_switches().items() if cls().environment()]
    return sorted(
        {a for a in ARMS if a not in counterfactual} | {"workers", "prefetch", "persistent_workers", "pin_memory", "in_order", *fixed}
    )


def try_on_script(program: Sequence[str], asked: Asked, protocol: Protocol, tell: Tell, base: Asked = NOTHING) -> Verdict:
    """Judge ``asked`` on ``program``, on which ``base`` is on in both arms: speed in turns or pairs, losses and memory apart."""
    parity, peaks, failure = _same_training(program, asked, base, tell)
    if failure:
        return does_not_run(asked.names, failure)
    measure = _pairs if asked.whole_runs else _turns
    groups, arms, error = measure(program, asked, base, protocol, tell)
    if error or sum(map(len, groups)) < 2:
        return does_not_run(asked.names, error or "the program ended before both arms had their turns: give it more steps", parity=parity)
    baseline, variant = (ArmSummary(b, peak, math.nan) for b, peak in zip(arms, peaks, strict=True))
    return decide(asked.names, estimate(groups), parity, baseline, variant, protocol)


# --- the same training? ---
def _same_training(program: Sequence[str], asked: Asked, base: Asked, tell: Tell) -> tuple[Parity, list[int | None], str]:
    """Losses of the first steps with and without, and with other seeds; the memory of both; why the variant does not run."""
    short = Orders(trace=False, stop_after_steps=PARITY_STEPS + 2, losses=PARITY_STEPS, saving=False)
    both = base.with_(asked)
    once = (base.orders(short), dict(base.environment))
    runs = {
        "baseline": once,
        "another seed": (replace(once[0], seed_offset=1000), once[1]),
        "a third seed": (replace(once[0], seed_offset=2000), once[1]),
        "the variant": (both.orders(short), dict(both.environment)),
    }
    if asked.numerics is Numerics.EXACT:
        runs["another seed"] = once  # the same once more: does it repeat itself?
        del runs["a third seed"]
    losses, peaks = {}, {}
    for name, (orders, environment) in runs.items():
        found = _run(program, orders, environment, f"losses of {name}", tell)
        error = _failed(found)
        if error and name == "the variant":
            return Parity(asked.numerics, False, 0, math.inf, 0.0, error), [None, None], error
        if error:
            raise ScriptFailed(found.code, found.error)
        losses[name], peaks[name] = found.processes[0]["losses"], found.processes[0].get("peak_bytes")
    return _judged(asked, losses), [peaks["baseline"], peaks["the variant"]], ""


def apply(program: Sequence[str], asked: Asked) -> int:
    """Run the script to its end with the switches on (from its second step; the loader's and the environment's from the start)."""
    orders = asked.orders(Orders(trace=False, to_the_end=True))
    return watch(program, orders, lambda steps, s: None, math.inf, environment=dict(asked.environment)).code


def _judged(asked: Asked, losses: Mapping[str, Sequence[float]]) -> Parity:
    own, variant = losses["baseline"], losses["the variant"]
    if asked.numerics is Numerics.EXACT:
        return judge(asked.numerics, variant, {"0": own}, losses["another seed"])
    found = judge(asked.numerics, variant, {"0": own, "1000": losses["another seed"], "2000": losses["a third seed"]})
    if not asked.loader or found.holds or not found.distance <= OTHER_STREAM * found.envelope:
        return found
    detail = f"{found.detail}: as far as another random stream takes it, which workers have"
    return replace(found, holds=True, detail=detail)


class ScriptFailed(RuntimeError):
    """The program itself failed, without any switch."""

    def __init__(self, code: int, said: str) -> None:
        super().__init__(f"the program ended with exit code {code} before it had trained enough steps")
        self.code, self.said = code, said


def _failed(found: Watched) -> str:
    if found.processes and len(found.processes[0]["rows"]) >= 3:
        return next((f"{n}: {e}" for n, e in (found.processes[0].get("probe_errors") or {}).items()), "")
    last = (found.error.strip().splitlines() or ["it trained no step"])[-1]
    return f"it ended with exit code {found.code}: {last}" if found.code else "it trained fewer than three steps"


def saying(tell: Tell, what: str, may_s: float) -> Callable[[int, float], None]:
    """What :func:`watch` calls while a run goes on."""
    return lambda steps, seconds: tell(what, seconds, may_s)


def _run(program: Sequence[str], orders: Orders, environment: Mapping[str, str], what: str, tell: Tell, may_s: float = 10.0) -> Watched:
    return watch(program, orders, saying(tell, what, may_s), START_LIMIT_S, quiet=True, environment=dict(environment))


# --- how fast? ---
def _turns(program: Sequence[str], asked: Asked, base: Asked, protocol: Protocol, tell: Tell) -> Measured:
    """Several fresh processes, in each of which the arms take turns."""
    arm = "+".join(asked.arms)
    groups: list[list[float]] = []
    kept: dict[str, list[Sequence[float]]] = {"baseline": [], arm: []}
    phases: Sequence[str] = ()
    each_s = max(3.0, protocol.budget_s / protocol.processes)
    step_s = 0.0
    for number in range(protocol.processes):
        block = max(1, min(50, round(protocol.block_s / step_s))) if step_s else 3
        orders = Orders(trace=False, probes=(arm,), probe_s=each_s, block_steps=block, saving=False)
        found = _run(program, base.orders(orders), base.environment, f"turns {number + 1} of {protocol.processes}", tell, each_s)
        if error := _failed(found):
            return [], [], error
        process = found.processes[0]
        phases = process["phases"]
        ratios, fixed = ratios_of(arm, process["kinds"], process["rows"], [3 + 3 * phases.index(p) for p in ASIDE if p in phases])
        groups.append([-math.log(fixed + (1 - fixed) / math.exp(r)) for r in ratios])
        for kind, row in zip(process["kinds"], process["rows"], strict=False):
            if kind in kept:
                kept[kind].append(row)
        step_s = sum(sum(r[3::3]) for r in kept["baseline"]) / max(1, len(kept["baseline"]))
        if number + 1 >= 3 and estimate(groups).resolution < protocol.resolution and number + 1 >= protocol.processes:
            break
    return groups, [_mean(kept["baseline"], phases), _mean(kept[arm], phases)], ""


def _mean(rows: Sequence[Sequence[float]], phases: Sequence[str]) -> StepBreakdown:
    count = max(1, len(rows))
    spent = {p: sum(r[3 + 3 * i] for r in rows) / count for i, p in enumerate(phases)}
    spent["forward"] = spent.get("forward", 0.0) + spent.pop("loss", 0.0)
    return StepBreakdown(spent, len(rows), 0)


def _pairs(program: Sequence[str], asked: Asked, base: Asked, protocol: Protocol, tell: Tell) -> Measured:
    """Pairs of fresh runs, in random order within each pair."""
    rng = random.Random(protocol.seed)
    each_s = max(4.0, protocol.budget_s / protocol.processes / 2)
    orders = Orders(trace=False, observe_s=each_s, least_steps=20, most_s=3 * each_s, saving=False)
    arms: dict[str, tuple[Orders, dict[str, str]]] = {
        "baseline": (base.orders(orders), dict(base.environment)),
        "variant": (base.with_(asked).orders(orders), dict(base.with_(asked).environment)),
    }
    groups: list[list[float]] = []
    seen: dict[str, list[Seen]] = {name: [] for name in arms}
    for number in range(protocol.processes):
        for name in rng.sample(list(arms), 2):
            asks, environment = arms[name]
            found = _run(program, asks, environment, f"pair {number + 1} of {protocol.processes}: {name}", tell, each_s)
            if error := _failed(found):
                return [], [], error
            seen[name].append(Seen(found.processes[0], found.fetchers, folder=folder_of(program)))
        groups.append([math.log(seen["baseline"][-1].step_s / seen["variant"][-1].step_s)])
    return groups, [_together(seen[name]) for name in arms], ""


def _together(runs: Sequence[Seen]) -> StepBreakdown:
    parts = [run.breakdown() for run in runs]
    phases = dict.fromkeys(p for part in parts for p in part.phase_s)
    mean = {p: sum(part.phase_s.get(p, 0.0) for part in parts) / len(parts) for p in phases}
    return StepBreakdown(mean, sum(p.steps for p in parts), sum(p.samples for p in parts))
