"""What a verdict says in plain words: the sentences that terminal and files share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from perftrain.facts import Decision, Numerics, Parity, Verdict
from perftrain.report import units

DECISION_WORDS = {
    Decision.FASTER: "faster",
    Decision.NO_DIFFERENCE: "no difference",
    Decision.NOT_RESOLVED: "not resolved",
    Decision.SLOWER: "slower",
    Decision.CHANGES_RESULT: "changes the result",
    Decision.DOES_NOT_RUN: "does not run",
}
WITH_REASON = (Decision.NOT_RESOLVED, Decision.CHANGES_RESULT, Decision.DOES_NOT_RUN)


def switch_names(switches: Iterable[str]) -> str:
    return " + ".join(units.one_line(s) for s in switches) or "no switches"


def headline(verdict: Verdict) -> str:
    """The decision and the one number or reason that belongs to it."""
    decided, speed = DECISION_WORDS[verdict.decision].upper(), units.factor(verdict.speedup, verdict.ci95)
    match verdict.decision:
        case Decision.FASTER:
            return f"{decided} {speed}"
        case Decision.SLOWER:
            return f"{decided} {speed}: {slowdown(verdict.speedup)}"
        case Decision.NO_DIFFERENCE:
            return f"{decided}: {resolution(verdict)}"
        case Decision.NOT_RESOLVED:
            return f"{decided}: {units.one_line(verdict.reason) or 'too few measurements for their scatter'}"
        case Decision.CHANGES_RESULT:
            return f"{decided}: {units.one_line(verdict.reason) or 'the losses are not those of the baseline'}"
        case Decision.DOES_NOT_RUN:
            return f"{decided}: {units.one_line(verdict.reason) or 'no reason was recorded'}"


def explanation(verdict: Verdict) -> str:
    """The second line: what the headline means, or what it left out."""
    speed, reason = units.factor(verdict.speedup, verdict.ci95), units.one_line(verdict.reason)
    more = "" if "×" in reason else reason  # a reason that restates the speedup says nothing new
    match verdict.decision:
        case Decision.FASTER | Decision.SLOWER:
            return " ".join(filter(None, (step_change(verdict.speedup), more)))
        case Decision.NO_DIFFERENCE:
            return " ".join(filter(None, (f"Measured {speed}." if units.known(verdict.speedup) else "", more)))
        case Decision.NOT_RESOLVED if units.known(verdict.speedup) and more == reason:
            return f"Measured {speed}; {resolution(verdict)}."
        case Decision.CHANGES_RESULT if units.known(verdict.speedup) and more == reason:
            return f"However fast ({speed}), it is another training."
    return ""


def bundle(verdict: Verdict) -> str:
    """The warning that belongs to several switches at once, or an empty string."""
    if len(verdict.switches) < 2:
        return ""
    return f"A bundle of {len(verdict.switches)} switches: the result cannot be attributed to one of them."


def slowdown(speedup: float | None) -> str:
    """0.97 → "3.0 % slower"."""
    return f"{units.share(None if speedup is None else abs(1 - speedup))} slower"


def step_change(speedup: float | None) -> str:
    """What a speedup means for one step: "A step takes 45.7 % less time."."""
    if speedup is None or not speedup > 0 or math.isinf(speedup):
        return ""
    return f"A step takes {units.share(abs(1 / speedup - 1))} {'less' if speedup >= 1 else 'more'} time."


def resolution(verdict: Verdict) -> str:
    if not units.known(verdict.resolution):
        return "how small an effect would have been seen is unknown"
    return f"anything over {units.share(verdict.resolution)} would have been seen"


def decision_cell(verdict: Verdict) -> str:
    """The decision for a table; "no difference" never stands without what it could have seen."""
    word = DECISION_WORDS[verdict.decision]
    if verdict.decision is Decision.NO_DIFFERENCE and units.known(verdict.resolution):
        return f"{word} over {units.share(verdict.resolution)}"
    return word


def open_reason(verdict: Verdict) -> str:
    """Why, for the decisions that mean nothing without it."""
    return units.one_line(verdict.reason) if verdict.decision in WITH_REASON else ""


def parity(found: Parity | None) -> str:
    """Did the training stay the same, and by how much does it differ."""
    detail = units.one_line(found.detail) if found else ""
    if found is None or not found.steps:
        return detail or "not compared"
    if found.numerics is Numerics.CHANGED:
        held = "changed by design (CHANGED), needs a convergence check"
    else:
        held = f"{'the same' if found.holds else 'NOT the same'} ({found.numerics.value})"
    return f"{held}: over {units.count(found.steps, 'step')} {_distance(found, detail)}"


def warmup_change(verdict: Verdict) -> str:
    """What the longer warm-up (compiling, mostly) costs, and when that is paid back."""
    before, after = verdict.baseline, verdict.variant
    if before is None or after is None or not (units.known(before.warmup_s) and units.known(after.warmup_s)):
        return units.UNKNOWN
    extra = after.warmup_s - before.warmup_s
    told = f"{'+' if extra >= 0 else ''}{units.seconds(extra)}"
    pays = pays_back(verdict)
    return f"{told}, {pays}" if pays else told


def pays_back(verdict: Verdict) -> str:
    """As "pays back after 120 steps (21 s)", or an empty string where nothing is to pay or it never is."""
    steps = verdict.break_even_steps
    if steps is None or not math.isfinite(steps) or steps <= 0:
        return ""
    whole = math.ceil(steps)
    lasting = f" ({units.seconds(whole * verdict.variant.breakdown.step_s)})" if verdict.variant else ""
    return f"pays back after {units.count(whole, 'step')}{lasting}"


def measured(verdict: Verdict) -> str:
    """How the numbers came about: "12 pairs in 2 processes, 84.0 s; anything over 1.2 % would have been seen"."""
    parts = [units.count(verdict.pairs, "pair")] if verdict.pairs else []
    parts += [f"in {units.count(verdict.processes, 'process')}"] if verdict.processes else []
    took = " ".join(parts) or "no pairs"
    took += f", {units.seconds(verdict.seconds)}" if verdict.seconds else ""
    said = verdict.decision in (Decision.NO_DIFFERENCE, Decision.NOT_RESOLVED)
    return took if said or not units.known(verdict.resolution) else f"{took}; {resolution(verdict)}"


def with_settings(switches: Iterable[str], settings: Mapping[str, Any]) -> str:
    """The switches with their fields, as set: "amp (dtype=bfloat16) + compile"."""
    return switch_names(f"{name}{_arguments(settings.get(name))}" for name in switches)


def variant_name(verdict: Verdict) -> str:
    """What the variant is called in a table: the switch itself, if its name is short."""
    name = switch_names(verdict.switches)
    return name if 0 < len(name) <= 16 and name != "baseline" else "variant"


def interval(verdict: Verdict) -> tuple[float, float] | None:
    """What is drawn of a speedup: its interval, or the bare number twice."""
    if verdict.speedup is None or not math.isfinite(verdict.speedup):
        return None
    return verdict.ci95 or (verdict.speedup, verdict.speedup)


def circumstances(verdict: Verdict) -> Iterator[tuple[str, str]]:
    """What is not a number of one arm: the losses, how it was measured, notes."""
    if verdict.decision is not Decision.DOES_NOT_RUN or verdict.parity:
        yield "losses", parity(verdict.parity)
    if verdict.pairs:
        yield "measured", measured(verdict)
    for note in verdict.notes:
        yield "note", units.one_line(note)


def _distance(found: Parity, detail: str) -> str:
    """The distance in words. The detail is told where the two numbers do not tell it all."""
    if not math.isfinite(found.distance):
        return detail or "the losses cannot be compared, they are not finite"
    if found.distance == 0:
        return "the losses are equal bit for bit"
    differ = f"the losses differ by {units.three(found.distance)}"
    if found.numerics is Numerics.EXACT or not found.envelope > 0:
        return f"{differ}; {detail}" if detail else differ
    times = found.distance / found.envelope
    compared = "within" if times <= 1 else f"{units.three(times)} times"
    return f"{differ}, {compared} the {units.three(found.envelope)} between the baseline's own seeds"


def _arguments(set_to: Any) -> str:
    if not isinstance(set_to, Mapping) or not set_to:
        return ""
    return f" ({', '.join(f'{units.one_line(k)}={units.one_line(v)}' for k, v in set_to.items())})"
