"""Switches of process-wide state: what they set while training, that it is gone afterwards, and what they refuse."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

from perftrain import PerftrainError, Trainer, opt
from perftrain.compare.duet import BASELINE, VARIANT
from perftrain.compare.job import Job
from perftrain.engine.checks import NotAvailable, check_switches
from perftrain.engine.process import environment, process_settings
from perftrain.facts import StepBreakdown
from perftrain.opt.allocator import find_library, with_options
from perftrain.opt.base import Switch
from perftrain.opt.seams import Plan
from perftrain.opt.threads import VARIABLE, WorkerThreads, physical_cores
from perftrain.store import Store

CPU, CUDA = Plan(), Plan(device=torch.device("cuda"))


def convnet() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def images() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(32, 3, 16, 16, generator=generator), torch.randint(0, 4, (32,), generator=generator))
    return DataLoader(data, batch_size=8, shuffle=True)


def trainer(*switches: Switch, model: nn.Module | None = None, loader: Any = None, **rest: Any) -> Trainer:
    model = model or convnet()
    loss_fn = None if "step" in rest else cross_entropy
    return Trainer(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), loader or images(), opt=switches, **rest)


def losses(*switches: Switch) -> list[float]:
    made = trainer(*switches)
    torch.manual_seed(5)
    made.fit(steps=8)
    return made.meter.losses()["loss"]


def run_python(source: str, **variables: str) -> str:
    found = subprocess.run([sys.executable, "-c", source], env={**os.environ, **variables}, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stdout.strip()


# --- threads ---
def test_threads_of_one_operation_are_set_while_training_only() -> None:
    before, seen = torch.get_num_threads(), []
    made = trainer(opt.Threads(intra_op=before + 2))
    assert torch.get_num_threads() == before
    made.fit(steps=2, on_step=lambda step: seen.append(torch.get_num_threads()))
    assert seen == [before + 2, before + 2]
    assert torch.get_num_threads() == before
    assert f"{before + 2} threads" in opt.Threads(intra_op=before + 2).describe(CPU)


def test_threads_are_restored_after_a_failure() -> None:
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), opt.Threads(intra_op=before + 1).process():
        assert 1 // (torch.get_num_threads() - before - 1)
    assert torch.get_num_threads() == before


def test_numbers_stay_close_with_other_threads() -> None:
    assert losses(opt.Threads(intra_op=1)) == pytest.approx(losses(opt.Threads(intra_op=3)), rel=1e-3)


class OwnThreads(Dataset[Tensor]):
    """Each sample says how many threads its process computes with."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(torch.get_num_threads()), float(os.environ.get("PERFTRAIN_TEST_WORKER", "-1"))])


def mark_worker(worker_id: int) -> None:
    os.environ["PERFTRAIN_TEST_WORKER"] = str(worker_id)


def seen_in_workers(*switches: Switch, **loader: Any) -> set[tuple[float, ...]]:
    seen: list[Tensor] = []

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append(batch)
        return model(batch).sum()

    model = nn.Linear(2, 1)
    made = trainer(*switches, model=model, loader=DataLoader(OwnThreads(), batch_size=2, **loader), step=step)
    made.fit(steps=4)
    return {tuple(row.tolist()) for batch in seen for row in batch}


def test_threads_of_workers_and_the_users_own_init() -> None:
    loader = {"num_workers": 1, "worker_init_fn": mark_worker}
    assert seen_in_workers(**loader) == {(1.0, 0.0)}
    assert seen_in_workers(opt.Threads(per_worker=3), **loader) == {(3.0, 0.0)}
    assert seen_in_workers(opt.Threads(per_worker=3), opt.Workers(num_workers=1)) == {(3.0, -1.0)}
    assert pickle.loads(pickle.dumps(WorkerThreads(3, mark_worker))) == WorkerThreads(3, mark_worker)


def test_threads_of_workers_where_there_are_none() -> None:
    with pytest.raises(PerftrainError, match=r"threads\.per_worker needs worker processes.*\+opt=\[workers,threads\]"):
        trainer(opt.Threads(per_worker=2))


def test_inter_op_gets_a_process_of_its_own() -> None:
    switch = opt.Threads(inter_op=3)
    assert opt.Threads().environment() == {}
    assert switch.environment() == {VARIABLE: "3"}
    with pytest.raises(PerftrainError, match=f"Start the script with: {VARIABLE}=3 python"):
        trainer(switch)
    source = "import torch; from perftrain import opt\n"
    source += "with opt.Threads(inter_op=3).process(): print(torch.get_num_interop_threads())\n"
    source += "with opt.Threads(inter_op=3).process(): print(torch.get_num_interop_threads())\n"  # every block of a comparison enters
    source += "try:\n    opt.Threads(inter_op=2).process().__enter__()\nexcept ValueError as error: print(error)"
    first, again, late = run_python(source, **switch.environment()).splitlines()
    assert (first, again) == ("3", "3")
    assert "once" in late
    assert "this process has 3 already and threads.inter_op=2" in late


def test_physical_cores_count_hyperthreads_once_and_heed_the_container(tmp_path: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    for cpu in cpus:
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text("0\n")
        (folder / "core_id").write_text("7\n")  # all of them threads of one core
    assert physical_cores(tmp_path, tmp_path / "absent") == 1
    assert physical_cores(tmp_path / "absent", tmp_path / "absent") == len(cpus)
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert physical_cores(tmp_path / "absent", tmp_path / "cpu.max") == min(2, len(cpus))
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert physical_cores(tmp_path / "absent", tmp_path / "cpu.max") == len(cpus)
    assert opt.Threads().count() == physical_cores()


# --- gc ---
class Garbage(nn.Module):
    """Leaves a reference cycle at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[weakref.ref[Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        cycle = nn.Identity()
        cycle.itself = [cycle]
        self.left.append(weakref.ref(cycle))
        return x


def test_garbage_is_collected_every_so_many_steps_and_not_between() -> None:
    garbage = Garbage()
    alive: list[int] = []
    made = trainer(opt.GC(every_steps=4), model=nn.Sequential(garbage, *convnet()))
    made.fit(steps=8, on_step=lambda step: alive.append(sum(ref() is not None for ref in garbage.left)))
    assert alive == [1, 2, 3, 0, 1, 2, 3, 0]


def test_gc_is_off_and_frozen_inside_and_as_before_outside() -> None:
    threshold = gc.get_threshold()
    assert gc.isenabled()
    with opt.GC().process():
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 1000
        with opt.GC().process():  # entered twice: the inner one must not thaw the outer one's
            pass
        assert gc.get_freeze_count() > 1000
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == threshold
    gc.disable()
    try:
        with opt.GC().process():
            pass
        assert not gc.isenabled()  # the user had it off
    finally:
        gc.enable()


def test_what_the_program_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with opt.GC().process():
            assert not gc.isenabled()
        assert gc.get_freeze_count() == pytest.approx(frozen, abs=50)
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_gc_keeps_the_losses_and_the_scheduler() -> None:
    assert losses(opt.GC(every_steps=2)) == losses()
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    Trainer(model, cross_entropy, optimizer, images(), opt=[opt.GC()], scheduler=scheduler).fit(steps=3)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.125)


# --- deterministic ---
class Scatter(nn.Module):
    """Uses an operation that has no deterministic algorithm."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x).put_(torch.arange(x.numel()), x.flatten(), accumulate=False)


def deterministic_state() -> tuple[bool, ...]:
    cudnn = torch.backends.cudnn
    return (
        torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
        cudnn.deterministic, cudnn.benchmark, torch.utils.deterministic.fill_uninitialized_memory,
    )  # fmt: skip


def test_deterministic_refuses_what_cannot_repeat_itself() -> None:
    before = deterministic_state()
    model = nn.Sequential(Scatter(), *convnet())
    trainer(model=model).fit(steps=1)
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        trainer(opt.Deterministic(), model=model).fit(steps=1)
    with pytest.warns(UserWarning, match="does not have a deterministic implementation"):
        trainer(opt.Deterministic(warn_only=True), model=model).fit(steps=1)
    assert deterministic_state() == before


def test_deterministic_sets_everything_inside_only() -> None:
    before = deterministic_state()
    with opt.Deterministic().process():
        assert deterministic_state() == (True, False, True, False, False)
    with opt.Deterministic(warn_only=True, fill_memory=True).process():
        assert deterministic_state() == (True, True, True, False, True)
        assert torch.empty(64).isnan().all()
    assert deterministic_state() == before
    assert losses(opt.Deterministic()) == losses(opt.Deterministic())
    assert losses(opt.Deterministic()) == pytest.approx(losses(), rel=1e-3)
    assert opt.Deterministic().predict(StepBreakdown({"forward": 1.0}, 1, 1)).high == 1.0


def test_deterministic_asks_cublas_only_where_there_is_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert opt.Deterministic().environment() == {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert opt.Deterministic().environment() == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert opt.Deterministic().environment() == {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    assert opt.Deterministic().environment() == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


# --- cudnn_benchmark ---
def test_cudnn_benchmark_is_for_cuda_and_restores() -> None:
    with pytest.raises(NotAvailable, match="cuDNN works on CUDA devices; this one is cpu"):
        check_switches([opt.CudnnBenchmark()], CPU)
    before = torch.backends.cudnn.benchmark
    with process_settings([opt.CudnnBenchmark()]):
        assert torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.benchmark == before
    assert opt.CudnnBenchmark().unfit({"convolutions": 0})
    with pytest.raises(PerftrainError, match="Linear has none"):
        opt.CudnnBenchmark().model(nn.Linear(2, 2), CUDA)
    with pytest.raises(PerftrainError, match="exclude each other"):
        check_switches([opt.CudnnBenchmark(), opt.Deterministic()], CUDA)


# --- allocator ---
MAPPED = "import torch; x = torch.ones(1 << 20); print('{}' in open('/proc/self/maps').read())"


@pytest.fixture(params=["jemalloc", "tcmalloc"])
def installed(request: pytest.FixtureRequest) -> Switch:
    switch = opt.Allocator(library=request.param)
    if reason := switch.unavailable(CPU):
        pytest.skip(reason)
    return switch


def test_the_library_is_really_loaded(installed: Any) -> None:
    variables = installed.environment()
    path = variables["LD_PRELOAD"].split(":")[0]
    name = Path(path).name.split(".so")[0]
    assert name.startswith(f"lib{installed.library}")
    assert run_python(MAPPED.format(name)) == "False"
    assert run_python(MAPPED.format(name), **variables) == "True"
    assert name in installed.describe(CPU)
    source = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\nfrom test_process_switches import losses; print(*losses())"
    assert run_python(source, **variables) == run_python(source)


def test_other_preloads_are_kept_and_ours_named_once(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = find_library(installed.library)[1]  # type: ignore[index]
    monkeypatch.setenv("LD_PRELOAD", "/lib/other.so")
    assert installed.environment()["LD_PRELOAD"] == f"{path}:/lib/other.so"
    monkeypatch.setenv("LD_PRELOAD", installed.environment()["LD_PRELOAD"])
    assert installed.environment()["LD_PRELOAD"] == f"{path}:/lib/other.so"
    assert set(opt.Allocator(library=installed.library, keep_memory=False).environment()) == {"LD_PRELOAD"}


def test_malloc_of_the_baseline_is_left_alone_beside_another_malloc(installed: Switch, tmp_path: Path) -> None:
    job = Job("any", {}, Store(tmp_path))
    environments, notes = job.environments([installed])
    assert "GLIBC_TUNABLES" not in environments[BASELINE]
    assert "LD_PRELOAD" in environments[VARIANT]
    assert notes == ()


def test_without_a_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("perftrain.opt.allocator.find_library", lambda wanted: None)
    assert opt.Allocator().unavailable(CPU) == "no library jemalloc or tcmalloc is installed; try: apt-get install libjemalloc2"
    assert opt.Allocator(library="tcmalloc").unavailable(CPU).endswith("apt-get install libtcmalloc-minimal4")
    assert opt.Allocator().environment() == {}


def test_settings_of_cudas_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    assert opt.Allocator().environment() == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert "CUDA" in opt.Allocator().unavailable(CPU)
    assert opt.Allocator().unavailable(CUDA) == ""
    assert "default" in opt.Allocator(expandable_segments=False).unavailable(CUDA)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native,max_split_size_mb:64")
    switch = opt.Allocator(garbage_collection_threshold=0.8, max_split_size_mb=128)
    expected = "backend:native,expandable_segments:True,garbage_collection_threshold:0.8,max_split_size_mb:128"
    assert switch.environment() == {"PYTORCH_CUDA_ALLOC_CONF": expected}
    assert with_options(expected, {"max_split_size_mb": "128"}) == expected


# --- together ---
def test_process_switches_compose() -> None:
    before = (torch.get_num_threads(), gc.isenabled(), deterministic_state())
    seen: list[tuple[Any, ...]] = []
    switches = [opt.GC(), opt.Threads(intra_op=1), opt.Deterministic(), opt.TF32(), opt.AMP()]
    made = trainer(*switches)
    made.fit(steps=2, on_step=lambda step: seen.append((torch.get_num_threads(), gc.isenabled(), deterministic_state()[0])))
    assert seen == [(1, False, True)] * 2
    assert (torch.get_num_threads(), gc.isenabled(), deterministic_state()) == before
    assert environment([opt.Threads(inter_op=2), opt.HugePages()])[VARIABLE] == "2"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: opt.Threads(intra_op=0), r"threads\.intra_op is 1 or more; it was 0.*Try opt\.threads\.intra_op"),
        (lambda: opt.Threads(inter_op=-1), r"threads\.inter_op is 1 or more; it was -1.*Try opt\."),
        (lambda: opt.Threads(per_worker=0), r"threads\.per_worker is 1 or more; it was 0.*Try opt\."),
        (lambda: opt.GC(every_steps=0), r"gc\.every_steps is 1 or more; it was 0.*Try opt\."),
        (lambda: opt.GC(generation=3), r"gc\.generation is 0, 1 or 2; it was 3.*Try opt\."),
        (lambda: opt.Allocator(library="mimalloc"), r"allocator\.library is one of auto, jemalloc, tcmalloc; it was 'mimalloc'.*Try opt\."),
        (lambda: opt.Allocator(garbage_collection_threshold=1.5), r"lies between 0 and 1; it was 1\.5.*Try opt\."),
        (lambda: opt.Allocator(max_split_size_mb=10), r"is more than 20; it was 10.*Try opt\."),
    ],
)
def test_a_bad_value_is_refused(make: Any, says: str) -> None:
    with pytest.raises(PerftrainError, match=says):
        make()
