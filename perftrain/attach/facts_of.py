"""What the program is set to, and the whole of what a process saw, as plain values."""

from __future__ import annotations

import gc
import resource
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from perftrain.cores import usable_cores

if TYPE_CHECKING:
    from perftrain.attach.session import Session


def world() -> tuple[int, int]:
    """(rank, number of ranks) of this process."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def program(session: Session) -> dict[str, Any]:
    """Settings that cost or save time, as they stand in the middle of training."""
    import torch

    rank, ranks = world()
    parameters = [p for o in session.optimizers.values() for g in o.param_groups for p in g["params"]]
    device = parameters[0].device.type if parameters else "cpu"
    return {
        "rank": rank, "ranks": ranks, "device": device, "cores": usable_cores(), "torch": torch.__version__,
        "threads": torch.get_num_threads(), "anomaly": torch.is_anomaly_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(), "parameter_dtypes": sorted({str(p.dtype) for p in parameters}),
        "optimizers": [_optimizer(o) for o in session.optimizers.values()], "roots": [_root(m) for m in session.roots.values()],
        "gc_enabled": gc.isenabled(), "gc_objects": len(gc.get_objects()),
        "loaders": sorted(session.loaders.values(), key=lambda each: -each["drawn"]),
    }  # fmt: skip


def _optimizer(optimizer: Any) -> dict[str, Any]:
    defaults = optimizer.defaults
    count = [p for g in optimizer.param_groups for p in g["params"]]
    return {"class": type(optimizer).__name__, "fused": bool(optimizer.param_groups[0].get("fused")), "can_fuse": "fused" in defaults,
            "foreach": optimizer.param_groups[0].get("foreach"), "can_foreach": "foreach" in defaults, "tensors": len(count),
            "parameters": sum(p.numel() for p in count), "by_hand": _of_the_user(type(optimizer))}  # fmt: skip


def _of_the_user(cls: type) -> bool:
    """Whether a class is the user's own and of no installed library."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None) or ""
    return "site-packages" not in file and not cls.__module__.startswith("torch.")


def _root(module: Any) -> dict[str, Any]:
    import torch

    convolutions = [m.weight for m in module.modules() if isinstance(m, torch.nn.Conv2d)]
    last = sum(w.is_contiguous(memory_format=torch.channels_last) and not w.is_contiguous() for w in convolutions)
    recurrent = sum(isinstance(m, torch.nn.RNNBase) for m in module.modules())
    cells = sum(isinstance(m, torch.nn.RNNCellBase) for m in module.modules())
    ordinary = sum(w.shape[1] > 1 and w.shape[2:].numel() > 1 for w in convolutions)
    return {
        "class": type(module).__name__, "training": module.training, "convolutions": ordinary, "channels_last": last,
        "recurrent": recurrent, "cells": cells, "ddp": isinstance(module, torch.nn.parallel.DistributedDataParallel),
        "modules": sum(1 for _ in module.modules()),
    }  # fmt: skip


def loader(found: Any) -> dict[str, Any]:
    """How a DataLoader is set up; ``drawn`` counts its batches."""
    return {
        "workers": found.num_workers, "persistent": found.persistent_workers, "prefetch": found.prefetch_factor,
        "pin_memory": found.pin_memory, "batch_size": found.batch_size, "dataset": type(found.dataset).__name__, "drawn": 0,
    }  # fmt: skip


def compiling(session: Session) -> dict[str, Any]:
    """Dynamo's own counters: graphs, graph breaks, and the compilations that went on after the first steps."""
    if "torch._dynamo" not in sys.modules:
        return {}
    try:
        from torch._dynamo.utils import counters, get_compilation_metrics

        offset = time.time() - time.perf_counter()
        metrics, found = get_compilation_metrics(), []
        for m in metrics:
            start = float(getattr(m, "start_time_us", None) or 1e6 * (getattr(m, "start_time", None) or 0.0)) / 1e6 - offset
            seconds = (getattr(m, "duration_us", None) or 0) / 1e6 or float(getattr(m, "entire_frame_compile_time_s", None) or 0.0)
            found.append((start, seconds, f"{m.co_filename}:{m.co_firstlineno} {m.co_name}", str(getattr(m, "fail_type", None) or "")))
        rows = session.clock.rows
        after = rows[min(1, len(rows) - 1)].end_s
        late = [f for f in found if f[0] > after]
        hit = [i for i in range(1, len(rows)) if any(rows[i - 1].end_s <= f[0] < rows[i].end_s for f in late)]
        failed = sum("recompile" in f[3].lower() or "limit" in f[3].lower() for f in found)
        counted = sum(counters["recompile_limit"].values()) if "recompile_limit" in counters else 0
        return {
            "frames": int(counters["stats"].get("unique_graphs", 0)), "compilations": len(found),
            "graph_breaks": {str(k).split("\n")[0][:200]: int(v) for k, v in counters["graph_break"].most_common(8)},
            "given_up": _given_up(metrics), "limit_hits": failed + counted, "break_lines": _break_lines(),
            "late": len(late), "late_s": sum(f[1] for f in late), "late_rows": hit, "names": sorted({f[2] for f in late or found})[:8],
        }  # fmt: skip
    except Exception as error:
        return {"failed": str(error)}


def peak_bytes() -> int:
    """The most memory that was in use: of the device where there is one, else of the process."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _given_up(metrics: Sequence[Any]) -> dict[str, str]:
    """What the compiler does not compile at all, as file:line and its reason."""
    return {
        f"{getattr(m, 'fail_user_frame_filename', None) or m.co_filename}:"
        f"{getattr(m, 'fail_user_frame_lineno', None) or m.co_firstlineno}": str(m.fail_reason).split("\n")[0][:200]
        for m in metrics if m.fail_type == "Unsupported"
    }  # fmt: skip


def _break_lines() -> list[str]:
    """Where the compiler gave up, as file:line of the innermost frame."""
    try:
        from torch._dynamo.utils import graph_break_reasons

        frames = [reason.user_stack[-1] for reason in graph_break_reasons if reason.user_stack]
        return list(dict.fromkeys(f"{f.filename}:{f.lineno}" for f in frames))[:8]
    except (ImportError, AttributeError, IndexError):
        return []


def record(session: Session) -> dict[str, Any]:
    """All that this process saw."""
    clock = session.clock
    state = session.state if session.state.get("threads") else program(session)
    names = sorted({phase for row in clock.rows for phase in row.phases})
    return {
        "pid": session.pid, "argv": sys.argv[:1], **state, "phases": names,
        "rows": [[r.end_s, r.forwards, r.backwards, *(v for n in names for v in r.phases.get(n, (0.0, 0.0, 0.0)))] for r in clock.rows],
        "kinds": session.turns.kinds if session.turns else [], "probe_errors": session.turns.errors if session.turns else {},
        "traced": sorted(session.traced_rows), "first_step_s": session.first_step_s, "counts": dict(session.counts),
        "sums": dict(session.sums), "before": list(session.before), "samples": session.sampler.rows() if session.sampler else [],
        "fetching": session.fetching.sums, "trace": session.trace.result,
        "losses": [float(loss) for loss in session.losses], "peak_bytes": peak_bytes(),
        "compiling": compiling(session), "rss": session.rss, "start_s": clock.started_s,
    }  # fmt: skip
