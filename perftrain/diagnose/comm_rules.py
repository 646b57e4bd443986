"""Rules on several ranks: how much is exchanged, how often, and who waits for whom."""

from __future__ import annotations

from collections.abc import Iterator

from perftrain.diagnose.finding import NOTABLE, bound, by_edit, by_probe, cause, milliseconds, saved, top_evidence, top_line
from perftrain.diagnose.seen import Seen
from perftrain.facts import Bottleneck, Cause, Evidence, Try

SMALL_BYTES = 1_000_000


def comm_causes(seen: Seen) -> Iterator[Cause]:
    if seen.ranks < 2:
        return
    if found := _imbalance(seen):
        yield found
        return
    silent = seen.probes.get("no_communication")
    share = seen.share("communication")
    upper = max(bound(share), silent.speedup if silent and silent.blocks else 1.0)
    if upper < NOTABLE:
        return
    calls, sent = seen.count("collectives"), seen.count("collective_bytes", "sums")
    lines: list[str | Evidence] = [
        f"exchanging between {seen.ranks} ranks takes {saved(upper):.0%} of the step",
        f"without any exchange, in turns: {silent.speedup:.2f}×" if silent and silent.blocks else "",
        f"{calls:.0f} calls a step, {sent / max(1.0, calls) / 1e3:.3g} kB each" if calls else "",
        *top_evidence(seen, "communication"),
    ]
    small = calls > 0 and sent / calls < SMALL_BYTES
    if small and (calls >= 8 or share > 0.6 * saved(upper)):
        edit = by_edit(
            "exchange all gradients in one flat tensor (torch._utils._flatten_dense_tensors), or wrap the model in DistributedDataParallel",
            0.8 * upper,
            upper,
            "one exchange instead of many small ones",
        )
        yield cause(Bottleneck.COMM_SYNC, saved(upper), upper, 0.85, lines, top_line(seen, "communication"), [edit])
        return
    yield _volume(seen, upper, lines)


def _volume(seen: Seen, upper: float, lines: list[str | Evidence]) -> Cause:
    once = seen.probes.get("no_sync")
    tries: list[Try] = []
    if once and once.blocks and once.low > 1.03:
        tries.append(by_probe("no_sync", once))
        upper = once.speedup
        lines.append(
            f"gradients are exchanged in each of {seen.backwards_per_step:.0f} backward passes of a step; only in the "
            f"last, in turns: {once.speedup:.2f}×"
        )
    tries.append(
        by_edit(
            "exchange 16-bit gradients: ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)",
            1.0,
            1 + 0.5 * (upper - 1),
            "half the bytes",
        )
    )
    return cause(Bottleneck.COMM_VOLUME, saved(upper), upper, 0.85, lines, top_line(seen, "communication", "backward"), tries)


def _imbalance(seen: Seen) -> Cause | None:
    """One rank computes longer, the others wait for it."""
    own = []
    for process in (seen.process, *seen.others):
        each = Seen(process, folder=seen.folder)
        waits = each.phase_s("communication")
        busy = sum(each.phase_s(p, 1) for p in each.phases)
        own.append(
            (
                each.process.get("rank", 0),
                each.step_s,
                waits,
                busy + each.phase_s("data_wait") - each.phase_s("data_wait", 1) + _asleep(each),
            )
        )
    if len(own) < 2:
        return None
    slowest = max(own, key=lambda o: o[3])
    mean = sum(o[3] for o in own) / len(own)
    upper = slowest[3] / max(1e-9, mean)
    if upper < 1.2:
        return None
    lines = [
        f"rank {slowest[0]} works {milliseconds(slowest[3])} a step, the ranks on average {milliseconds(mean)}: the others wait for it"
    ]
    edit = by_edit(
        "give every rank the same amount of work (equal numbers of samples and tokens, one-rank work spread or dropped)",
        0.85 * upper,
        upper,
        "nobody waits for the slowest",
    )
    return cause(Bottleneck.COMM_IMBALANCE, saved(upper), upper, 0.8, lines, top_line(seen, "communication", "backward"), [edit])


def _asleep(seen: Seen) -> float:
    """Waiting outside of collectives: between the phases and in the forward pass."""
    return sum(max(0.0, seen.phase_s(p) - seen.phase_s(p, 1)) for p in ("rest", "forward"))
