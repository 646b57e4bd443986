"""Everything that can be refused is refused here, before anything is built."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from perftrain.facts import PerftrainError
from perftrain.opt.base import Switch
from perftrain.opt.seams import Plan


class NotAvailable(PerftrainError):
    """A switch cannot run on this machine. Not the user's mistake: the verdict is "does not run"."""


def check_switches(switches: Sequence[Switch], plan: Plan) -> None:
    """Each at most once, no two that conflict, each able to run here.

    Raises:
        PerftrainError: a double or a conflict.
        NotAvailable: something is missing on this machine.
    """
    names = [s.card.name for s in switches]
    doubles = [name for name, count in Counter(names).items() if count > 1]
    if doubles:
        raise PerftrainError(f"A switch is on once or off; {doubles[0]!r} is given {names.count(doubles[0])} times. Name it once.")
    for switch in switches:
        for other in switch.card.conflicts:
            if other in names:
                raise PerftrainError(
                    f"The switches {switch.card.name!r} and {other!r} exclude each other; both are on. "
                    f"Leave one out: +opt={switch.card.name} or +opt={other}."
                )
    for switch in switches:
        reason = switch.unavailable(plan)
        if reason:
            raise NotAvailable(f"{switch.card.name} cannot run here: {reason}")
