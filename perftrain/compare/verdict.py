"""From timing and parity to the one decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perftrain.compare.duet import Protocol
from perftrain.facts import ArmSummary, Decision, Numerics, Parity, Verdict
from perftrain.measure.statistics import Estimate


def decide(
    switches: Sequence[str],
    estimate: Estimate,
    parity: Parity,
    baseline: ArmSummary,
    variant: ArmSummary,
    protocol: Protocol,
    disturbed: bool = False,
    **rest: Any,
) -> Verdict:
    """The verdict where both arms ran. ``disturbed``: other programs were busy all along."""
    decision, reason = _speed(estimate, protocol, disturbed)
    if not parity.holds and parity.numerics is not Numerics.CHANGED:
        reason = f"{parity.detail}. Its speed: {reason}"
        decision = Decision.CHANGES_RESULT
    return Verdict(
        switches=tuple(switches),
        decision=decision,
        reason=reason,
        speedup=estimate.speedup,
        ci95=(estimate.low, estimate.high),
        resolution=max(estimate.resolution, protocol.min_effect),
        pairs=estimate.rounds,
        processes=estimate.processes,
        parity=parity,
        baseline=baseline,
        variant=variant,
        break_even_steps=break_even(baseline, variant, estimate.speedup) if estimate.low > 1 else None,
        **rest,
    )


def _speed(found: Estimate, protocol: Protocol, disturbed: bool) -> tuple[Decision, str]:
    """Faster or slower only if the interval excludes 1 and the effect is at least ``min_effect``.

    Bursts of other programs are no normal noise, and a handful of rounds does not average them out: where they could not be
    set aside, the effect must also be one that would be seen nine times in ten.
    """
    least = 1 + (max(protocol.min_effect, found.resolution) if disturbed else protocol.min_effect)
    interval = f"{found.speedup:.3f}× [{found.low:.3f}, {found.high:.3f}]"
    if found.low > 1 and found.speedup >= least:
        return Decision.FASTER, f"{interval}: the whole interval lies above 1"
    if found.high < 1 and found.speedup <= 1 / least:
        return Decision.SLOWER, f"{interval}: the whole interval lies below 1"
    seen = max(found.resolution, protocol.min_effect)
    if disturbed and not found.low <= 1 <= found.high:
        return (
            Decision.NOT_RESOLVED,
            f"{interval}: other programs were busy all along, and then only an effect over {seen:.1%} counts; measure on a quieter machine",
        )
    if found.resolution > protocol.max_resolution:
        return (
            Decision.NOT_RESOLVED,
            f"{interval} is too wide: only an effect over {seen:.1%} would have been seen; give it more --budget",
        )
    return Decision.NO_DIFFERENCE, f"{interval}: an effect over {seen:.1%} would have been seen, and there is none"


def break_even(baseline: ArmSummary, variant: ArmSummary, speedup: float) -> float | None:
    """Steps until a longer warm-up is paid back by shorter steps."""
    extra_s = variant.warmup_s - baseline.warmup_s
    saved_s = baseline.breakdown.step_s * (1 - 1 / speedup)
    return extra_s / saved_s if extra_s > 0 and saved_s > 0 else None


def does_not_run(switches: Sequence[str], reason: str, **rest: Any) -> Verdict:
    return Verdict(switches=tuple(switches), decision=Decision.DOES_NOT_RUN, reason=reason, **rest)


def changes_result(switches: Sequence[str], reason: str, parity: Parity | None, **rest: Any) -> Verdict:
    return Verdict(switches=tuple(switches), decision=Decision.CHANGES_RESULT, reason=reason, parity=parity, **rest)


def settings_of(opts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {str(o["_target_"]).split(".")[-2]: {k: v for k, v in o.items() if k != "_target_"} for o in opts}
