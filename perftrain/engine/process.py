"""Process-wide state: environment variables, settings that are restored, and the random generators."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from perftrain.facts import PerftrainError
from perftrain.opt.base import Switch


def environment(switches: Iterable[Switch]) -> dict[str, str]:
    """The variables that all switches together need before Python starts.

    Raises:
        PerftrainError: two switches want different values of one variable.
    """
    merged: dict[str, str] = {}
    for switch in switches:
        for name, value in switch.environment().items():
            if merged.setdefault(name, value) != value:
                raise PerftrainError(
                    f"A variable has one value; two switches want {name}={merged[name]!r} and {value!r}. Leave one of them out."
                )
    return merged


def require_environment(switches: Iterable[Switch]) -> None:
    """Refuse switches whose variables came too late for this process.

    Raises:
        PerftrainError: naming the variable and how to start the script with it.
    """
    for switch in switches:
        late = {k: v for k, v in switch.environment().items() if os.environ.get(k) != v}
        if late:
            line = " ".join(f"{k}={v}" for k, v in late.items())
            raise PerftrainError(
                f"The switch {switch.card.name!r} works through variables that must stand before Python starts, and they are not set. "
                f"Start the script with: {line} python {os.path.basename(sys.argv[0]) or 'train.py'}"
            )


@contextmanager
def process_settings(switches: Iterable[Switch]) -> Iterator[None]:
    """All ``process()`` contexts of the switches, in order; restored on exit whatever happens."""
    with ExitStack() as stack:
        for switch in sorted(switches, key=lambda s: s.card.place):
            stack.enter_context(switch.process())
        yield


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


class RandomState:
    """The random generators' states, so that two arms in one process each keep a stream of their own."""

    def __init__(self) -> None:
        self.take()

    def take(self) -> None:
        """Remember the current states."""
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []

    def put(self) -> None:
        """Make the remembered states current."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when its parent dies, even while it is stopped (Linux; elsewhere no effect).

    ``parent``: who started it, where that may be dead by now (importing takes seconds).
    """
    if not sys.platform.startswith("linux"):
        return
    parent = parent or os.getppid()
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it died in between
        os._exit(1)


class MortalWorker:
    """A ``worker_init_fn`` that runs the user's own after tying the worker's life to its parent's. Picklable."""

    def __init__(self, inner: Any = None) -> None:
        self.inner = inner

    def __call__(self, worker_id: int) -> None:
        die_with_parent()
        if self.inner is not None:
            self.inner(worker_id)
