"""A watched script does what it does alone, and what was seen of it is true."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from perftrain.attach.launch import Watched, watch
from perftrain.attach.orders import Orders
from perftrain.diagnose.probe import probes_of
from perftrain.diagnose.seen import Seen

QUICK = Orders(observe_s=1.0, least_steps=20, most_s=6.0)
HEAD = """
import sys, time, torch
from torch import nn
torch.manual_seed(3)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters())
"""


def script(folder: Path, body: str, head: str = HEAD, name: str = "train.py") -> str:
    path = folder / name
    path.write_text(head + textwrap.dedent(body))
    return str(path)


def observe(path: str, orders: Orders = QUICK, *arguments: str, quiet: bool = True) -> Watched:
    return watch([path, *arguments], orders, lambda steps, s: None, 90, quiet=quiet)


def alone(path: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, path, *arguments], capture_output=True, text=True)


def watched_output(path: str, capfd: Any, *arguments: str) -> tuple[str, Watched]:
    capfd.readouterr()
    found = observe(path, Orders(to_the_end=True), *arguments, quiet=False)
    return capfd.readouterr().out, found


STEP = """
    loss = model(torch.randn(32, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_output_arguments_exit_code_and_losses_are_those_of_the_script_alone(tmp_path: Path, capfd: Any) -> None:
    body = "print(sys.argv, __name__, __file__)\nfor _ in range(40):" + STEP + "    print(repr(loss.item()))\nsys.exit(7)\n"
    path = script(tmp_path, body)
    expected = alone(path, "a", "b=1", "--json", "x")
    out, found = watched_output(path, capfd, "a", "b=1", "--json", "x")
    assert out == expected.stdout
    assert found.code == expected.returncode == 7
    assert len(found.processes[0]["rows"]) == 40
    assert sorted(p.name for p in tmp_path.iterdir()) == ["train.py"]


def test_a_compiled_model_computes_the_same(tmp_path: Path, capfd: Any) -> None:
    path = script(
        tmp_path,
        "fast = torch.compile(model, backend='aot_eager')\nfor _ in range(12):"
        + STEP.replace("model(", "fast(")
        + "    print(repr(loss.item()))\n",
    )
    expected = alone(path)
    out, found = watched_output(path, capfd)
    assert out == expected.stdout
    assert found.processes[0]["compiling"]["late"] == 0


def test_the_program_is_ended_once_enough_is_seen(tmp_path: Path) -> None:
    path = script(tmp_path, "try:\n  for _ in range(10**9):" + STEP.replace("    ", "     ") + "finally:\n  open('left', 'w').close()\n")
    found = watch([path], QUICK, lambda steps, s: None, 90, quiet=True)
    assert found.ended_early
    assert found.code == 0
    Path("left").unlink()  # its own cleaning up still ran


def test_planted_waits_are_found_in_their_phases_in_proportion(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        from torch.utils.data import DataLoader, Dataset
        class Slow(Dataset):
            def __len__(self): return 4000
            def __getitem__(self, i):
                time.sleep(0.001)
                return torch.randn(8)
        class Late(nn.Module):
            def forward(self, x):
                time.sleep(0.004)
                return x
        model = nn.Sequential(Late(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, x in enumerate(DataLoader(Slow(), batch_size=8)):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.002)
            if step % 10 == 9:
                model.eval()
                with torch.no_grad():
                    for _ in range(5):
                        model(x)
                model.train()
        """,
    )
    seen = Seen(observe(path).processes[0])
    spent = {p: 1e3 * seen.phase_s(p) for p in ("data_wait", "forward", "rest", "evaluation")}
    assert 8 < spent["data_wait"] < 13, spent
    assert 4 < spent["forward"] < 6, spent
    assert 1.7 < spent["rest"] < 4, spent
    assert 2 < spent["evaluation"] < 3.5, spent
    assert sum(map(seen.phase_s, seen.phases)) == pytest.approx(seen.step_s)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        (
            "accumulation",
            "for i in range(400):\n    for _ in range(4):\n        (model(torch.randn(32, 8)).mean() / "
            "4).backward()\n    optimizer.step()\n    optimizer.zero_grad()\n",
        ),
        (
            "closure",
            "optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)\nx = torch.randn(32, 8)\ndef closure():\n  "
            "  optimizer.zero_grad()\n"
            "    loss = model(x).square().mean()\n    loss.backward()\n    return loss\nfor _ in range(200):\n    "
            "optimizer.step(closure)\n",
        ),
        (
            "two optimizers",
            "other = nn.Linear(8, 1)\nsecond = torch.optim.SGD(other.parameters(), lr=0.1)\nfor _ in range(400):\n    "
            "x = torch.randn(32, 8)\n"
            "    model(x).square().mean().backward()\n    optimizer.step()\n    other(x).square().mean().backward()\n    second.step()\n",
        ),
        (
            "autocast and scaler",
            "scaler = torch.amp.GradScaler('cpu')\nfor _ in range(400):\n    with torch.autocast('cpu', "
            "torch.bfloat16):\n        loss = model(torch.randn(32, 8)).square().mean()\n"
            "    optimizer.zero_grad()\n    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()\n",
        ),
    ],
)
def test_many_kinds_of_loops(tmp_path: Path, name: str, body: str) -> None:
    found = observe(script(tmp_path, body))
    assert found.code == 0, found.error
    seen = Seen(found.processes[0])
    assert {"forward", "backward", "optimizer"} <= set(seen.phases)
    assert seen.phase_s("backward") > 0
    if name == "accumulation":
        assert seen.backwards_per_step == 4
        assert seen.share("forward") > 0.1


def test_a_script_that_updates_by_hand(tmp_path: Path) -> None:
    body = "w = torch.zeros(8, requires_grad=True)\nfor _ in range(400):\n    (torch.randn(32, 8) @ w - 1).square().mean().backward()\n"
    path = script(tmp_path, body + "    with torch.no_grad():\n        w -= 0.1 * w.grad\n    w.grad = None\n", "import torch\n")
    found = observe(path)
    assert found.code == 0, found.error
    assert len(found.processes[0]["rows"]) > 20
    assert Seen(found.processes[0]).phase_s("backward") > 0


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_say_what_a_batch_took(tmp_path: Path, method: str) -> None:
    path = script(
        tmp_path,
        f"""
        from torch.utils.data import DataLoader, Dataset
        class Slow(Dataset):
            def __len__(self): return 100_000
            def __getitem__(self, i):
                time.sleep(0.002)
                return torch.randn(8)
        if __name__ == "__main__":
            for x in DataLoader(Slow(), batch_size=8, num_workers=2, multiprocessing_context="{method}"):
                loss = model(x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        """,
    )
    found = observe(path)
    seen = Seen(found.processes[0], found.fetchers, folder=str(tmp_path))
    assert seen.workers == 2
    assert seen.fetching["wall_s"] / seen.fetching["samples"] == pytest.approx(0.0021, rel=0.5)
    assert seen.lines("worker")[0][0] == "train.py:13"


@pytest.mark.distributed
def test_ranks_that_the_script_starts(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import torch, torch.distributed as dist, torch.multiprocessing as mp
        from torch import nn
        def train(rank, file):
            dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
            torch.set_num_threads(1)
            model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(100_000):
                loss = model(torch.randn(4, 8)).mean()
                optimizer.zero_grad()
                loss.backward()
                dist.all_reduce(torch.ones(3))
                optimizer.step()
        if __name__ == "__main__":
            mp.spawn(train, (sys.argv[1],), nprocs=2)
        """,
        "import sys\n",
    )
    found = observe(path, QUICK, str(tmp_path / "meet"))
    assert [p["rank"] for p in found.processes] == [0, 1]
    assert found.code == 0, found.error
    seen = Seen(found.processes[0], others=found.processes[1:])
    assert seen.count("collectives") == pytest.approx(1, abs=0.1)
    assert seen.phase_s("communication") > 0


def test_counterfactuals_take_turns(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import gc
        gc.collect(); ballast = [[i] for i in range(300_000)]
        torch.autograd.set_detect_anomaly(True)
        for _ in range(10**9):
            loss = model(torch.randn(32, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            gc.collect()
        """,
    )
    names = ("no_gc", "anomaly_off")
    found = observe(path, Orders(probes=names, probe_s=3.0, trace=False))
    probes = probes_of(found.processes[0], names)
    assert probes["no_gc"].low > 2
    assert 0.8 < probes["anomaly_off"].speedup < 1.6
    assert probes["no_gc"].blocks >= 3


JUDGE = """
judge = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1))
for _ in range(400):
    loss = judge(model(torch.randn(32, 8))).square().mean() + 0 * model(torch.randn(32, 8)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    BY_HAND
"""


@pytest.mark.parametrize("by_hand", [False, True])
def test_gradients_that_nobody_uses_and_those_that_are_used_by_hand(tmp_path: Path, by_hand: bool) -> None:
    update = "torch._foreach_sub_([p.data for p in judge.parameters()], [0.01 * p.grad for p in judge.parameters()])"
    path = script(tmp_path, JUDGE.replace("BY_HAND", update if by_hand else "pass"))
    found = observe(path, Orders()).processes[0]["trace"]
    assert (found["gradients"]["unused_share"] > 0) is not by_hand
    assert sorted({(f["used"], f["zero"]) for f in found["forwards"]}) == [(False, True), (True, False)]


def test_a_run_that_only_measures_does_not_save(tmp_path: Path) -> None:
    kept = tmp_path / "model.pt"
    path = script(tmp_path, f"for _ in range(300):{STEP}    torch.save(model.state_dict(), {str(kept)!r})\n")
    assert observe(path, Orders(probes=("no_gc",), probe_s=1.0, saving=False)).code == 0
    assert not kept.exists()


def test_a_failing_script_is_told_with_its_code(tmp_path: Path) -> None:
    found = observe(script(tmp_path, "raise RuntimeError('no data here')"))
    assert found.code == 1
    assert "no data here" in found.error
    assert found.processes == []
