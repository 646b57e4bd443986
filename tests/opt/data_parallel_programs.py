"""What several ranks run in test_data_parallel.py: each function is one program; started as ``-m`` with their names."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from perftrain import PerftrainError, Trainer, opt
from perftrain.measure.losses import NotFiniteLoss
from perftrain.opt.base import Switch

STEPS = 10
EPOCHS = 9
"""Steps: three epochs, so that going on begins an epoch."""
BOTH: dict[str, Callable[..., Switch]] = {"ddp": opt.DDP, "fsdp": opt.FSDP}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.relu(self.wide(self.norm(x))))


def residual() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), Block(), Block(), Block(), nn.Linear(16, 4))


def samples(count: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 8, generator=generator), torch.randint(0, 4, (count,), generator=generator))


def trainer(*switches: Switch, model: nn.Module | None = None, loader: Any = None, **rest: Any) -> Trainer:
    model = model or residual()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(samples(), batch_size=8, shuffle=True) if loader is None else loader
    return Trainer(model, rest.pop("loss_fn", cross_entropy), optimizer, loader, opt=switches, **rest)


def losses(*switches: Switch, steps: int = STEPS, **rest: Any) -> list[float]:
    made = trainer(*switches, **rest)
    torch.manual_seed(5)
    made.fit(steps=steps)
    return made.meter.losses()["loss"]


def message(make: Callable[[], Any]) -> str:
    try:
        make()
    except PerftrainError as error:
        return str(error)
    return "no error"


# --- the same training ---
def same_losses() -> Any:
    return {name: losses(make()) for name, make in BOTH.items()}


def clipped() -> Any:
    return {name: losses(make(), clip_norm=0.1) for name, make in BOTH.items()}


def accumulated() -> Any:
    return {name: losses(make(), opt.Accumulation(micro_batches=2)) for name, make in BOTH.items()}


def in_bfloat16() -> Any:
    return {name: losses(make(), opt.AMP()) for name, make in BOTH.items()}


def with_workers() -> Any:
    return {name: losses(make(), opt.Workers(num_workers=1)) for name, make in BOTH.items()}


def scheduled() -> Any:
    found = {}
    for name, make in BOTH.items():
        model = residual()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        loader = DataLoader(samples(), batch_size=8)
        made = Trainer(model, cross_entropy, optimizer, loader, opt=[make()], scheduler=schedule)
        made.fit(steps=STEPS)
        found[name] = made.meter.losses()["loss"]
    return found


def facts() -> Any:
    made = trainer(opt.DDP())
    own: list[float] = []
    made.run.functions.model.register_forward_hook(lambda module, inputs, output: own.append(len(inputs[0])))
    made.fit(steps=3)
    return {"rank": made.rank, "samples": [row.samples for row in made.rows], "own": own, "ranks": made.record.environment["ranks"]}


# --- who gets what ---
class Augmented(Dataset[Any]):
    """Each visit draws random numbers, more of them on one rank than on the other."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        self.seen.append(index)
        torch.rand(1 + 2 * dist.get_rank())
        random.random()
        return torch.zeros(8), 0


def shares() -> Any:
    found = {}
    for name, make in BOTH.items():
        dataset = Augmented()
        made = trainer(make(), loader=DataLoader(dataset, batch_size=8, shuffle=True))
        torch.manual_seed(5)
        made.fit(epochs=3)
        found[name] = dataset.seen
    return found


class Epochs(torch.utils.data.Sampler[int]):
    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Any:
        return iter(torch.randperm(24, generator=torch.Generator().manual_seed(self.epoch)).tolist())


def told_the_epoch() -> Any:
    dataset = Augmented()
    trainer(opt.DDP(), loader=DataLoader(dataset, batch_size=8, sampler=Epochs())).fit(epochs=2)
    return dataset.seen


def own_randomness() -> Any:
    trainer(opt.DDP())
    return [torch.rand(()).item(), random.random()]


# --- mistakes ---
class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.zeros(8), 0)] * 8)


def refused() -> Any:
    data = samples()

    def built(loader: Any, switch: Switch | None = None) -> str:
        return message(lambda: trainer(switch or opt.DDP(), loader=loader))

    uneven = torch.utils.data.BatchSampler(range(24), 8, False)
    uneven.__class__ = type("Odd", (torch.utils.data.BatchSampler,), {"__iter__": lambda self: iter([[0, 1, 2]])})
    return {
        "size": built(DataLoader(data, batch_size=7, drop_last=True)),
        "last": built(DataLoader(samples(25), batch_size=8)),
        "stream": built(DataLoader(Stream(), batch_size=8)),
        "list": built([(torch.zeros(8, 8), torch.zeros(8, dtype=torch.long))]),
        "sampler": built(DataLoader(data, batch_size=8, sampler=DistributedSampler(data))),
        "unbatched": built(DataLoader(data, batch_size=None)),
        "three": built(DataLoader(data, batch_size=6), opt.DDP(ranks=3)),
        "batches": message(lambda: trainer(opt.DDP(), loader=DataLoader(data, batch_sampler=uneven)).fit(steps=1)),
        "drop_last": built(DataLoader(samples(25), batch_size=8, drop_last=True)),
    }


def not_finite() -> Any:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        loss = cross_entropy(output, target)
        return loss * float("nan") if dist.get_rank() == 1 and len(calls) == 3 else loss

    calls: list[int] = []
    try:
        trainer(opt.DDP(), loss_fn=loss_fn).fit(steps=100)
    except NotFiniteLoss as error:
        return [error.step, len(calls)]
    return "no error"


# --- knobs ---
def exchanges(switch: Switch, *more: Switch, steps: int = 3) -> int:
    """Buckets of gradients that are exchanged in ``steps`` steps, after as many without counting."""
    made = trainer(switch, *more)
    wrapper: Any = made.model
    calls: list[int] = []

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        calls.append(1)
        return dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future().then(lambda future: future.value()[0])

    hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}
    wrapper.register_comm_hook(None, hook)
    made.fit(steps=steps)
    calls.clear()
    made.fit(steps=steps)
    return len(calls)


def bucket_knobs() -> Any:
    def storage(view: bool) -> bool:
        sizes: list[int] = []
        made = trainer(opt.DDP(gradient_as_bucket_view=view))
        first = next(made.model.parameters())
        made.run.functions = made.run.functions.with_(clip=lambda: sizes.append(first.grad.untyped_storage().nbytes()))  # type: ignore[union-attr]
        made.fit(steps=2)
        return sizes[-1] > 4 * first.numel()

    return {
        "one": exchanges(opt.DDP()),
        "many": exchanges(opt.DDP(bucket_mb=0.001)),
        "accumulated": exchanges(opt.DDP(), opt.Accumulation(micro_batches=4)),
        "view": storage(True),
        "copy": storage(False),
    }


class Half(nn.Module):
    """Has a layer that it never uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def static_graph() -> Any:
    found = losses(opt.DDP(static_graph=True), model=Half(), steps=3)
    accumulated = losses(opt.DDP(static_graph=True), opt.Accumulation(micro_batches=2), steps=3)
    try:
        losses(opt.DDP(), model=Half(), steps=3)
    except RuntimeError as error:
        return {"static": found, "accumulated": accumulated, "dynamic": str(error)[:60]}
    return "no error"


def sharded() -> Any:
    from torch.distributed.tensor.debug import CommDebugMode

    def gathered_after_forward(reshard: bool) -> bool:
        def loss_fn(output: Tensor, target: Tensor) -> Tensor:
            kept.append(not isinstance(next(made.model[1].parameters()), DTensor))  # type: ignore[index]
            return cross_entropy(output, target)

        kept: list[bool] = []
        made = trainer(opt.FSDP(reshard_after_forward=reshard), loss_fn=loss_fn)
        made.fit(steps=1)
        return kept[0]

    def scattered(*more: Switch) -> int:
        made = trainer(opt.FSDP(), *more)
        made.fit(steps=1)
        with CommDebugMode() as counted:
            made.fit(steps=2)
        return sum(count for name, count in counted.get_comm_counts().items() if "reduce_scatter" in str(name))

    def seen_type(*switches: Switch) -> str:
        model, seen = residual(), list[str]()
        model[1].wide.register_forward_hook(lambda module, inputs, output: seen.append(str(module.weight.dtype)))
        trainer(*switches, model=model).fit(steps=1)
        return seen[0]

    made = trainer(opt.FSDP())
    weight: Any = made.model[1].wide.weight  # type: ignore[index]
    return {
        "local": list(weight.to_local().shape),
        "state": [list(made.optimizer.state[p]["exp_avg"].to_local().shape) for p in [weight] if made.fit(steps=1)],
        "kept": [gathered_after_forward(reshard) for reshard in (True, False)],
        "scattered": [scattered(), scattered(opt.Accumulation(micro_batches=4))],
        "types": [seen_type(opt.FSDP()), seen_type(opt.FSDP(dtype="bfloat16")), seen_type(opt.FSDP(), opt.AMP())],
        "kept_in": str(weight.dtype),
    }


def equal_start() -> Any:
    """Ranks that built different models train rank 0's."""
    found = {}
    for name, make in BOTH.items():
        torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
        found[name] = losses(make(), model=nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    return found


# --- checkpoints ---
def checkpoints(folder: str) -> Any:
    """Load what one process saved and go on; save what one process will go on from."""
    found = {}
    for name, make in BOTH.items():
        made = trainer(make(), loader=DataLoader(samples(), batch_size=8))
        made.load(Path(folder) / "one.pt")
        made.fit(steps=EPOCHS)
        found[name] = made.meter.losses()["loss"]
        made = trainer(make(), loader=DataLoader(samples(), batch_size=8))
        made.fit(steps=EPOCHS)
        made.save(Path(folder) / f"{name}.pt")
        made.fit(steps=EPOCHS)
        found[f"{name} goes on"] = made.meter.losses()["loss"]
    return found


def main() -> None:
    torch.set_num_threads(1)
    found = {}
    for name in sys.argv[1:]:
        program, _, argument = name.partition("=")
        found[program] = globals()[program](*([argument] if argument else []))
    dist.barrier()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
