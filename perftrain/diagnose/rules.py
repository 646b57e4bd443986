"""From the shares of a step to the bottleneck that rules, in words. Records in, Diagnosis out; nothing is printed here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perftrain.facts import Avoid, Bottleneck, Card, Cause, Diagnosis, Evidence, Gain, StepBreakdown, Try

PHASE_LABEL = {
    "data_wait": Bottleneck.INPUT_WORKERS,
    "copy": Bottleneck.INPUT_TRANSFER,
    "optimizer": Bottleneck.OPTIMIZER_STEP,
    "evaluation": Bottleneck.LOOP_EVAL,
    "checkpoint": Bottleneck.LOOP_CHECKPOINT,
    "rest": Bottleneck.HOST_PYTHON,
}
WORDS = {
    "data_wait": "waiting for the next batch",
    "copy": "copying batches to the device",
    "optimizer": "the optimizer",
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
    "rest": "Python code between the phases",
}
NOTABLE_SHARE = 0.10
"""A phase below this is not worth naming as a cause."""

POPULAR = ("workers", "prefetch", "pin_memory", "amp", "tf32", "channels_last", "compile", "fused", "cudnn_benchmark", "gc")
"""Switches that are tried by habit."""


def diagnose_phases(
    breakdown: StepBreakdown, switches: Mapping[str, tuple[Card, Gain]], peaks: Mapping[str, Any] | None = None
) -> Diagnosis:
    """What the phase shares alone can say: which phase rules, and how much its removal could give at most.

    Args:
        switches: the candidates that are not on yet: name -> card and predicted gain.
        peaks: the machine's measured peaks, if known: they tell whether a lower precision has anything to give.
    """
    shares = {phase: breakdown.share(phase) for phase in breakdown.phase_s}
    compute_share = breakdown.share("forward", "backward")
    causes = [_phase_cause(phase, shares[phase], breakdown, switches) for phase in PHASE_LABEL if shares.get(phase, 0) >= NOTABLE_SHARE]
    compute = _compute_cause(compute_share, breakdown, switches, peaks or {})
    causes.append(compute)
    causes.sort(key=lambda cause: -cause.share)
    ruling = causes[0]
    healthy = ruling.label is Bottleneck.COMPUTE_SATURATED and len(causes) == 1
    return Diagnosis(breakdown=breakdown, causes=tuple(causes), healthy=healthy, sentence=_sentence(ruling, breakdown))


def _phase_cause(phase: str, share: float, breakdown: StepBreakdown, switches: Mapping[str, tuple[Card, Gain]]) -> Cause:
    label = PHASE_LABEL[phase]
    seconds = breakdown.phase_s[phase]
    return Cause(
        label=label,
        share=share,
        upper_bound=1 / max(1e-3, 1 - share),
        confidence=0.6,
        evidence=(Evidence(f"{WORDS[phase]} takes {1e3 * seconds:.3g} ms of every {1e3 * breakdown.step_s:.3g} ms step ({share:.0%})"),),
        tries=_tries(label, switches),
        avoids=_avoids(label, switches),
    )


def _compute_cause(share: float, breakdown: StepBreakdown, switches: Mapping[str, tuple[Card, Gain]], peaks: Mapping[str, Any]) -> Cause:
    """Forward and backward: bound by precision where the device is measurably faster in 16 bits, else saturated."""
    factor = precision_factor(peaks)
    label = Bottleneck.COMPUTE_PRECISION if factor > 1.3 and "amp" in switches else Bottleneck.COMPUTE_SATURATED
    lines = [Evidence(f"forward and backward take {share:.0%} of the step")]
    if factor > 1.3:
        lines.append(Evidence(f"this machine multiplies bfloat16 matrices {factor:.1f} times as fast as float32 (measured)"))
    bound = Gain.from_share(share, factor, factor, "").low if label is Bottleneck.COMPUTE_PRECISION else 1.0
    related = (label, Bottleneck.COMPUTE_LAYOUT, Bottleneck.LAUNCH_OVERHEAD, Bottleneck.COMPUTE_MEMORY_BOUND)
    tries = tuple(dict.fromkeys(t for each in related for t in _tries(each, switches)))[:4]
    return Cause(label, share, bound, 0.5, tuple(lines), tries=tries, avoids=_avoids(label, switches, related))


def precision_factor(peaks: Mapping[str, Any]) -> float:
    """How many times as fast this machine multiplies bfloat16 matrices as float32 ones; 1.0 where unknown."""
    rates = {}
    for name in ("float32", "bfloat16"):
        found = peaks.get("matmul", {}).get(name)
        if found and found.get("seconds"):
            rates[name] = found["amount"] / found["seconds"]
    return rates["bfloat16"] / rates["float32"] if len(rates) == 2 else 1.0


def _tries(label: Bottleneck, switches: Mapping[str, tuple[Card, Gain]]) -> tuple[Try, ...]:
    fitting = [(card, gain) for card, gain in switches.values() if label in card.relieves and gain.high > 1.02]
    fitting.sort(key=lambda pair: -pair[1].high)
    return tuple(Try(predicted=(gain.low, gain.high), because=gain.because, switch=card.name) for card, gain in fitting[:3])


def _avoids(label: Bottleneck, switches: Mapping[str, tuple[Card, Gain]], related: Sequence[Bottleneck] = ()) -> tuple[Avoid, ...]:
    """What people reach for first, where its predicted ceiling is below 5 %, each with its own reason."""
    relieved = {label, *related}
    return tuple(
        Avoid(name, f"at most {switches[name][1].high:.2f}×: {switches[name][1].because}")
        for name in POPULAR
        if name in switches and not relieved & set(switches[name][0].relieves) and switches[name][1].high < 1.05
    )


def _sentence(cause: Cause, breakdown: StepBreakdown) -> str:
    step = f"{1e3 * breakdown.step_s:.3g} ms step"
    if cause.label in (Bottleneck.COMPUTE_PRECISION, Bottleneck.COMPUTE_SATURATED):
        head = f"Computing rules: forward and backward are {cause.share:.0%} of the {step}"
        if cause.label is Bottleneck.COMPUTE_PRECISION:
            return f"{head}, in float32 on a machine that is faster in 16 bits: at most {cause.upper_bound:.2f}× from lower precision."
        return f"{head}; nothing else is large enough to matter much."
    phase = next(p for p, label in PHASE_LABEL.items() if label is cause.label)
    limit = f"without it training would be at most {cause.upper_bound:.2f}× as fast"
    return f"{WORDS[phase].capitalize()} rules: {cause.share:.0%} of the {step}; {limit}."
