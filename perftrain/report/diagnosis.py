"""A diagnosis on the terminal: the step as a bar, then each cause with its evidence and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from perftrain.facts import Cause, Diagnosis, StepBreakdown
from perftrain.report import run_words, units
from perftrain.report.bars import PhaseBar, Swatch, looks, phases_of
from perftrain.report.layout import avoids, line, named, paragraph, table, tries

SHOWN = (
    "weights_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "workspace_bytes", "fragmented_bytes", "process_bytes",
)  # fmt: skip
"""Categories of memory on the terminal."""


def print_diagnosis(console: Console, program: str, place: str, diagnosis: Diagnosis, notes: Iterable[str] = ()) -> None:
    """The phase picture, the ruling bottleneck in a sentence, then the causes in order."""
    paragraph(console, program, "bold")
    paragraph(console, place, "dim")
    console.print()
    print_phases(console, diagnosis.breakdown)
    console.print()
    console.print(named([("healthy" if diagnosis.healthy else "bottleneck", line(diagnosis.sentence, "bold"))]))
    for number, cause in enumerate(diagnosis.causes, 1):
        console.print()
        console.print(named(_cause(number, cause, diagnosis.healthy)))
    vain = diagnosis.causes[0].avoids if diagnosis.causes else ()
    if vain:
        console.print()
        console.print(named([("will not help", avoids(vain))]))
    if diagnosis.memory:
        console.print()
        console.print(named([("memory", _memory(diagnosis.memory))]))
    for note in notes:
        paragraph(console, note, "dim")


def print_phases(console: Console, now: StepBreakdown) -> None:
    """One step as a bar, and its key."""
    if not now.step_s > 0:
        return
    phases = phases_of([now])
    console.print(
        Text.assemble(("step ", "dim"), (units.seconds(now.step_s), "bold"), (f" (mean of {units.count(now.steps, 'step')})", "dim"))
    )
    console.print(PhaseBar(now, phases, now.step_s))
    key = table("", "phase", "ms", "share", numbers=["ms", "share"], fixed=[""])
    for phase, look in looks(phases).items():
        key.add_row(
            Swatch(look), line(units.label(phase)), line(units.milliseconds(now.phase_s[phase])), line(units.share(now.share(phase)))
        )
    console.print(key)


def _memory(memory: Mapping[str, Any]) -> str:
    """As "weights 9.2 MiB · gradients 9.2 MiB · optimizer 18.4 MiB · activations 40 MiB · workspace 3 MiB · process 812 MiB"."""
    parts = [f"{units.label(k.removesuffix('_bytes'))} {units.size(memory[k])}" for k in SHOWN if memory.get(k)]
    growth = memory.get("growth_bytes_per_step", 0.0)
    if growth > units.GROWTH_BYTES:
        parts.append(f"growing by {units.size(int(growth))} a step")
    if memory.get("largest_batch"):
        parts.append(
            f"room for batches of about {memory['largest_batch']:,} (activations "
            f"{units.size(memory['activations_bytes_per_sample'])} a sample)"
        )
    return " · ".join(parts)


def _cause(number: int, cause: Cause, healthy: bool) -> Iterable[tuple[str, RenderableType]]:
    head = f"{cause.label}" if healthy else f"{run_words.cause_line(cause)} · confidence {units.share(cause.confidence)}"
    yield f"{number}.", line(head, "" if healthy else "bold")
    if cause.evidence:
        yield "evidence", Text("\n").join(line(units.one_line(e.line)) for e in cause.evidence[:6])
    if cause.tries:
        yield "try", tries(cause.tries)
