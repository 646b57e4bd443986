"""The closed loop: diagnose, try the most promising switch by itself, keep it only if it is proved, diagnose again.

Nothing here knows whether a recipe or a script is tuned: a :class:`Front` diagnoses and measures, this decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from perftrain.facts import Decision, Diagnosis, Numerics, Verdict

Switches = tuple[str, ...]
"""As typed: ``("amp", "workers=4")``."""


class Front(Protocol):
    """What is tuned."""

    def diagnose(self, kept: Switches) -> Diagnosis:
        """The program with ``kept`` on."""
        ...

    def compare(self, base: Switches, more: Switches) -> Verdict:
        """``base`` and ``more`` on, against ``base`` alone."""
        ...

    def refuse(self, switch: str, kept: Switches) -> str:
        """Why ``switch`` cannot be put on beside ``kept``, or an empty string."""
        ...

    def neighbours(self, switch: str) -> Sequence[str]:
        """The same switch with other values of its number, the nearest first; empty where it has none."""
        ...


@dataclass(frozen=True)
class Settings:
    min_gain: float = 0.02
    """A candidate that promises less than this is not tried."""
    allow_changed: bool = False
    """Whether switches that change the training on purpose may be kept."""
    budget_s: float = 600.0


@dataclass(frozen=True)
class Entry:
    """One line of the ledger: what was promised beside what was measured."""

    switch: str
    predicted: tuple[float, float]
    because: str
    verdict: Verdict
    beside: Switches
    """What was on already."""
    kept: bool
    reason: str


@dataclass(frozen=True)
class Untried:
    switch: str
    reason: str


@dataclass
class Tuned:
    """Where the loop came to."""

    kept: Switches = ()
    ledger: list[Entry] = field(default_factory=list)
    untried: list[Untried] = field(default_factory=list)
    total: Verdict | None = None
    """All kept switches as a bundle, against the program as it was."""
    before: Diagnosis | None = None
    after: Diagnosis | None = None
    edits: list[str] = field(default_factory=list)
    """What a diagnosis recommends that no switch can do."""
    stopped: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Candidate:
    switch: str
    predicted: tuple[float, float]
    because: str
    confidence: float

    @property
    def promise(self) -> float:
        """Predicted gain times confidence."""
        return (sum(self.predicted) / 2 - 1) * self.confidence


def tune(front: Front, settings: Settings, say: Callable[[str], None]) -> Tuned:
    """Tune until no candidate promises ``min_gain`` or the budget is spent."""
    found, began, tried = Tuned(), time.monotonic(), set[str]()

    def left() -> float:
        return settings.budget_s - (time.monotonic() - began)

    while True:
        diagnosis = front.diagnose(found.kept)
        found.before, found.after = found.before or diagnosis, diagnosis
        say(f"diagnosis{' with ' + ', '.join(found.kept) if found.kept else ''}: {diagnosis.sentence}")
        kept_one = False
        for candidate in _candidates(diagnosis, front, found, tried, settings):
            if left() < 0:
                break
            tried.add(_name(candidate.switch))
            if _try(front, candidate, found, settings, say):
                kept_one = True
                break
        if left() < 0:
            found.stopped = "the budget is spent"
            break
        if not kept_one:
            found.stopped = "no candidate promises more"
            break
    _prove(front, found, say, left)
    found.edits = list(dict.fromkeys(t.edit for c in (found.after or diagnosis).causes for t in c.tries if t.edit))
    for vain in found.before.causes[0].avoids if found.before and found.before.causes else ():
        if _name(vain.switch) not in tried:
            _leave(found, vain.switch, vain.because)
    found.untried += [Untried(c.switch, found.stopped) for c in _candidates(diagnosis, front, found, tried, settings)]
    found.seconds = time.monotonic() - began
    return found


def _name(switch: str) -> str:
    return switch.partition("=")[0]


def _candidates(diagnosis: Diagnosis, front: Front, found: Tuned, tried: set[str], settings: Settings) -> list[Candidate]:
    """What the diagnosis recommends and has not been tried, the most promising first."""
    best: dict[str, Candidate] = {}
    for cause in diagnosis.causes:
        for attempt in cause.tries:
            if not attempt.switch or _name(attempt.switch) in tried:
                continue
            candidate = Candidate(attempt.switch, attempt.predicted, attempt.because, cause.confidence)
            if attempt.predicted[1] - 1 < settings.min_gain:
                _leave(found, attempt.switch, f"promises only {attempt.predicted[1]:.2f}×")
            elif why := front.refuse(attempt.switch, found.kept):
                _leave(found, attempt.switch, why)
            elif attempt.switch not in best or candidate.promise > best[attempt.switch].promise:
                best[attempt.switch] = candidate
    return sorted(best.values(), key=lambda c: -c.promise)


def _leave(found: Tuned, switch: str, why: str) -> None:
    if all(u.switch != switch for u in found.untried):
        found.untried.append(Untried(switch, why))


def _try(front: Front, candidate: Candidate, found: Tuned, settings: Settings, say: Callable[[str], None]) -> bool:
    """Measure one switch by itself, and its neighbours if it has a number. Whether one of them was kept."""
    best: Entry | None = None
    for switch in (candidate.switch, *front.neighbours(candidate.switch)):
        if switch != candidate.switch and best is None:
            break
        verdict = front.compare(found.kept, (switch,))
        keeps, reason = _worth(verdict, settings)
        say(f"{switch}: {reason} (predicted {candidate.predicted[0]:.2f} to {candidate.predicted[1]:.2f}×)")
        entry = Entry(switch, candidate.predicted, candidate.because, verdict, found.kept, keeps, reason)
        if best is not None and not _better(verdict, best.verdict, settings):
            found.ledger.append(replace(entry, kept=False, reason=f"{reason}, no better than {best.switch}" if keeps else reason))
            break  # the number is past its best
        if best is not None:
            found.ledger[found.ledger.index(best)] = replace(best, kept=False, reason=f"{best.reason}, but {switch} gives more")
        found.ledger.append(entry)
        best = entry if keeps else best
    if best is None:
        return False
    found.kept = (*found.kept, best.switch)
    return True


def _worth(verdict: Verdict, settings: Settings) -> tuple[bool, str]:
    """Kept only if the interval's lower end is a gain and the training stays the same."""
    speed = f"{verdict.speedup:.2f}× [{verdict.ci95[0]:.2f}, {verdict.ci95[1]:.2f}]" if verdict.speedup and verdict.ci95 else ""
    changed = verdict.parity is not None and verdict.parity.numerics is Numerics.CHANGED
    if verdict.decision is Decision.FASTER and changed and not settings.allow_changed:
        return False, f"faster {speed}, but it changes the training (tune.allow_changed=true keeps it)"
    if verdict.decision is Decision.FASTER:
        return True, f"faster {speed}"
    words = {Decision.SLOWER: "slower", Decision.NO_DIFFERENCE: "no difference", Decision.NOT_RESOLVED: "not resolved"}
    if verdict.decision in words:
        return False, f"{words[verdict.decision]} {speed}"
    return False, verdict.reason


def _better(verdict: Verdict, than: Verdict, settings: Settings) -> bool:
    """A larger number must pay for itself."""
    return verdict.decision is Decision.FASTER and (verdict.speedup or 0.0) > (than.speedup or 0.0) * (1 + settings.min_gain)


def _prove(front: Front, found: Tuned, say: Callable[[str], None], left: Callable[[], float]) -> None:
    """The winner as a bundle against the program as it was; before that, each of several kept switches is left out once."""
    for switch in found.kept if len(found.kept) > 1 else ():
        if left() < 0:
            break
        others = tuple(s for s in found.kept if s != switch)
        verdict = front.compare(others, (switch,))
        if verdict.decision is not Decision.FASTER:
            say(f"{switch}: gives nothing beside the others, removed")
            found.kept = others
            found.ledger = [
                replace(e, kept=False, reason=f"{e.reason}; gives nothing beside {', '.join(others)}")
                if e.kept and e.switch == switch
                else e
                for e in found.ledger
            ]
    if not found.kept:
        return
    if len(found.kept) == 1:
        found.total = next(e.verdict for e in found.ledger if e.kept and e.switch == found.kept[0])
    else:
        found.total = front.compare((), found.kept)
    if found.total.decision is not Decision.FASTER:
        say(f"the bundle is not faster than the program as it was ({found.total.reason}): nothing is kept")
        found.kept = ()
