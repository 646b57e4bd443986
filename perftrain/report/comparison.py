"""Baseline and variant side by side, as rows of text that terminal and files share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from perftrain.facts import ArmSummary, Verdict
from perftrain.report import run_words, units, words
from perftrain.report.bars import phases_of


@dataclass(frozen=True)
class Row:
    name: str
    baseline: str
    variant: str
    change: str = ""
    phase: str = ""
    """Set where the row is one phase of a step: its key in ``StepBreakdown.phase_s``."""


def comparison(verdict: Verdict) -> list[Row]:
    """Step, phases, throughput, memory, warm-up and bottleneck of both arms; an arm that is missing is "–"."""
    return [*_time_rows(verdict), *_other_rows(verdict)]


def _time_rows(verdict: Verdict) -> Iterator[Row]:
    arms = verdict.baseline, verdict.variant
    yield _numbers("step", arms, lambda arm: arm.breakdown.step_s, units.seconds)
    for phase in phases_of(arm.breakdown for arm in arms if arm):
        row = _numbers(units.label(phase), arms, lambda arm, p=phase: arm.breakdown.phase_s.get(p, 0.0), units.seconds)
        yield Row(row.name, row.baseline, row.variant, row.change, phase)


def _other_rows(verdict: Verdict) -> Iterator[Row]:
    arms = verdict.baseline, verdict.variant
    if any(arm and arm.breakdown.samples for arm in arms):
        yield _numbers("samples/s", arms, run_words.samples_per_s, units.three)
    yield _numbers("memory peak", arms, lambda arm: arm.peak_bytes, units.size)
    if any(arm and units.known(arm.warmup_s) for arm in arms) or not all(arms):
        warmup = _numbers("warm-up", arms, lambda arm: arm.warmup_s, units.seconds)
        yield Row(warmup.name, warmup.baseline, warmup.variant, words.warmup_change(verdict))
    if any(arm and units.known(arm.final_loss) for arm in arms):
        yield _numbers("final loss", arms, lambda arm: arm.final_loss, units.three, compared=False)
    if any(arm and arm.bottleneck for arm in arms):
        before, after = (units.one_line(arm.bottleneck) if arm and arm.bottleneck else units.UNKNOWN for arm in arms)
        yield Row("bottleneck", before, after)


def _numbers(
    name: str,
    arms: tuple[ArmSummary | None, ArmSummary | None],
    read: Callable[[ArmSummary], float | None],
    told: Callable[[float | None], str],
    compared: bool = True,
) -> Row:
    old, new = (read(arm) if arm else None for arm in arms)
    return Row(name, told(old), told(new), units.change(new, old) if compared else "")
