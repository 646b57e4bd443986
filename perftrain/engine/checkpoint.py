"""What a training must know to go on: whole tensors by plain names, the same file for one process and for several ranks."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from perftrain.engine.ranks import Ranks
from perftrain.facts import PerftrainError

FORMAT = 1
"""Version of the file."""


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any = None) -> dict[str, Any]:
    """Model, optimizer and schedule as whole tensors on the CPU, under the names that the model has without wrappers.

    All ranks must call it; only rank 0 gets the tensors (the others would hold copies for nothing).
    """
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    started = bool(optimizer.state)  # asked for the state of a fresh one, torch would make a first step of nothing
    return {
        "format": FORMAT,
        "model": get_model_state_dict(model, options=whole),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=whole) if started else None,
        "scheduler": scheduler.state_dict() if scheduler is not None else None,
    }


def load_state(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any = None) -> None:
    """The inverse of :func:`state_of`, for any number of ranks. All ranks must call it, each with the whole state.

    Raises:
        PerftrainError: a state of another format, or of a program with a schedule where this one has none (or the reverse).
    """
    if state.get("format") != FORMAT:
        raise PerftrainError(f"A checkpoint has format {FORMAT}; this one has {state.get('format')}. Save it again with this version.")
    if (state["scheduler"] is None) != (scheduler is None):
        has, lacks = ("the program", "the checkpoint") if scheduler is not None else ("the checkpoint", "the program")
        raise PerftrainError(f"Checkpoint and program have a schedule both, or neither; {has} has one and {lacks} has none.")
    whole = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, state["model"], options=whole)
    if state["optimizer"] is not None:
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=whole)
    if scheduler is not None:
        scheduler.load_state_dict(state["scheduler"])


def save(path: str | Path, state: dict[str, Any], ranks: Ranks) -> None:
    """Write a state so that the file is whole or not there. Rank 0 writes, all wait until it is done."""
    path = Path(path)
    if ranks.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(handle, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    if ranks.size > 1:
        dist.barrier()


def load(path: str | Path) -> dict[str, Any]:
    """Read what :func:`save` wrote; plain tensors and values only, no code is run.

    Raises:
        PerftrainError: no such file, or none of ours.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise PerftrainError(f"A checkpoint is a file that Trainer.save wrote; there is none at {path}.") from None
    if not isinstance(state, dict) or "format" not in state:
        raise PerftrainError(f"A checkpoint is a file that Trainer.save wrote; {path} is another one.")
    return state
