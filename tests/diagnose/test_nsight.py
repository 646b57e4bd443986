"""Reports of nsys and ncu are read like programs that were watched, and what they show is told apart."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
from pathlib import Path

import pytest

from perftrain import nsight
from perftrain.attach.operations import PHASE_SPAN, STEP_MARK
from perftrain.diagnose import nsys_file
from perftrain.diagnose.ncu_file import read_ncu
from perftrain.diagnose.nsys_file import read_nsys
from perftrain.diagnose.ranking import diagnose
from perftrain.facts import Bottleneck, Cause, PerftrainError
from perftrain.options import sort_out
from tests.conftest import run_cli
from tests.diagnose.nsight_reports import Nsys, ncu_csv

STEPS, STEP_US = 12, 10_000


def marked(report: Nsys, own: bool = True) -> Nsys:
    """Steps of 10 ms on the host: 1 ms loading, 3 forward, 4 backward, 1 optimizer, 1 in no phase."""
    for i in range(STEPS):
        t = STEP_US * i
        for begin, end, phase in ((0, 1, "data_wait"), (1, 4, "forward"), (4, 8, "backward"), (8, 9, "optimizer")):
            report.range(t + 1000 * begin, t + 1000 * end, f"perftrain::{phase}" if own else phase.replace("data_wait", "dataloader"))
        if own:
            report.mark(t, "perftrain::end of step")
        else:
            report.range(t, t + STEP_US, f"step {i}")
    return report


def first(report: Nsys, path: Path) -> Cause:
    return diagnose(read_nsys(report.write(path / "report.sqlite"))).causes[0]


def busy(report: Nsys, *spans: tuple[float, float]) -> Nsys:
    """One long kernel in each stretch (ms) of every step."""
    for i in range(STEPS):
        for begin, end in spans:
            report.kernel(STEP_US * i + 1000 * begin, STEP_US * i + 1000 * end, "ampere_fp16_s16816gemm_fp16_128x128")
    return report


@pytest.mark.parametrize("own", [True, False])
def test_phases_and_steps_come_from_nvtx(tmp_path: Path, own: bool) -> None:
    seen = read_nsys(busy(marked(Nsys(), own), (0, 10)).write(tmp_path / "report.sqlite"))
    assert seen.step_s == pytest.approx(0.010)
    shares = {p: round(seen.share(p), 3) for p in ("data_wait", "forward", "backward", "optimizer", "rest")}
    assert shares == {"data_wait": 0.1, "forward": 0.3, "backward": 0.4, "optimizer": 0.1, "rest": 0.1}
    assert seen.trace["device_busy_s"] == pytest.approx(seen.trace["wall_s"])
    assert {nsys_file.PHASE_SPAN, nsys_file.STEP_MARK} == {PHASE_SPAN, STEP_MARK}


def test_a_range_inside_another_takes_its_time_away(tmp_path: Path) -> None:
    report = busy(marked(Nsys()), (0, 10))
    for i in range(STEPS):
        report.range(STEP_US * i + 2000, STEP_US * i + 3000, "perftrain::communication")
    seen = read_nsys(report.write(tmp_path / "report.sqlite"))
    assert seen.share("forward") == pytest.approx(0.2)
    assert seen.share("communication") == pytest.approx(0.1)
    assert sum(map(seen.phase_s, seen.phases)) == pytest.approx(seen.step_s)


def test_gaps_between_tiny_kernels_are_launching(tmp_path: Path) -> None:
    report = marked(Nsys())
    for i in range(STEPS):
        for k in range(350):  # 4 us of every 20
            report.kernel(STEP_US * i + 1000 + 20 * k, STEP_US * i + 1004 + 20 * k)
        report.kernel(STEP_US * i + 8000, STEP_US * i + 11_000, "ampere_fp16_s16816gemm_fp16")
    found = first(report, tmp_path)
    assert found.label is Bottleneck.LAUNCH_OVERHEAD
    assert found.share == pytest.approx(0.56, abs=0.01)
    assert any("100% of them less than 10 us" in e.line for e in found.evidence)


def test_what_a_device_waits_for_is_told_apart(tmp_path: Path) -> None:
    data = first(busy(marked(Nsys()), (1, 2), (6, 10)), tmp_path)
    assert data.label is Bottleneck.HOST_PYTHON  # a gap of 4 ms within forward: no launching takes that long
    (tmp_path / "report.sqlite").unlink()

    drained = busy(marked(Nsys()), (0, 6))  # an .item() that returns when the device is done, then nothing to do
    for i in range(STEPS):
        drained.call(STEP_US * i + 3000, STEP_US * i + 6010, "cudaStreamSynchronize_v3020")
    found = first(drained, tmp_path)
    assert found.label is Bottleneck.HOST_SYNC
    assert found.share == pytest.approx(0.4, abs=0.01)
    assert any("cudaStreamSynchronize: 1 a step" in e.line for e in found.evidence)
    (tmp_path / "report.sqlite").unlink()

    late = Nsys()
    for i in range(STEPS):
        late.mark(STEP_US * i, "perftrain::end of step")
        late.range(STEP_US * i, STEP_US * i + 6000, "perftrain::data_wait")
        late.range(STEP_US * i + 6000, STEP_US * i + 10_000, "perftrain::forward")
    assert first(busy(late, (6, 10)), tmp_path).label is Bottleneck.INPUT_WORKERS
    (tmp_path / "report.sqlite").unlink()
    assert first(busy(late, (0, 10)), tmp_path).label is Bottleneck.COMPUTE_SATURATED  # the host waits, the device does not


def test_copies_exchanges_and_layouts(tmp_path: Path) -> None:
    cases = {
        Bottleneck.INPUT_TRANSFER: lambda r, t: r.upload(t, t + 4000, pageable=True),
        Bottleneck.COMM_VOLUME: lambda r, t: r.kernel(t, t + 4000, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)"),
        Bottleneck.COMPUTE_LAYOUT: lambda r, t: r.kernel(t, t + 4000, "void cudnn::ops::nchwToNhwcKernel<float>"),
    }
    for number, (label, plant) in enumerate(cases.items()):
        report = busy(marked(Nsys()), (4, 10))
        for i in range(STEPS):
            plant(report, STEP_US * i)
        found = diagnose(read_nsys(report.write(tmp_path / f"{number}.sqlite"))).causes
        assert [c.label for c in found] == [label]
        assert found[0].share == pytest.approx(0.4, abs=0.01)
        assert label is not Bottleneck.INPUT_TRANSFER or "pin_memory" in {t.switch for t in found[0].tries}


def test_a_busy_device_alone_is_no_verdict(tmp_path: Path) -> None:
    found = diagnose(read_nsys(busy(Nsys(), (0, 10)).write(tmp_path / "report.sqlite")))
    assert not found.healthy
    assert "--ncu tells" in found.sentence
    assert {a.switch for a in found.causes[0].avoids} <= {"amp", "tf32"}  # of what is not marked nothing is claimed


def test_one_device_of_one_process_is_looked_at(tmp_path: Path) -> None:
    report = busy(marked(Nsys()), (0, 10))
    for i in range(STEPS):
        report.kernel(STEP_US * i, STEP_US * i + 10, device=1, process=9 << 24)
    assert read_nsys(report.write(tmp_path / "report.sqlite")).trace["device_busy_s"] == pytest.approx(0.08)


def test_ncu_tells_compute_from_memory(tmp_path: Path) -> None:
    path = tmp_path / "report.csv"
    gemm, add = ("sm90_xmma_gemm_bf16bf16_bf16f32", 1200.0, 85.0, 40.0), ("vectorized_elementwise_kernel", 400.0, 12.0, 91.0)
    path.write_text(ncu_csv(gemm, gemm, gemm))
    found = diagnose(read_ncu(path))
    assert found.healthy
    assert found.causes[0].label is Bottleneck.COMPUTE_SATURATED
    assert any("at 85% of peak compute and 40% of peak memory" in e.line for e in found.causes[0].evidence)
    path.write_text(ncu_csv(gemm, add, add, add, add))
    found = diagnose(read_ncu(path))
    assert found.causes[0].label is Bottleneck.COMPUTE_MEMORY_BOUND
    assert found.causes[0].share == pytest.approx(1200 / 2800)  # one of four stays
    assert found.breakdown.phase_s == pytest.approx({"elementwise": 1.6e-3, "product": 1.2e-3, "rest": 0.0})
    path.write_text(ncu_csv(*[("tiny_kernel", 3.0, 6.0, 9.0)] * 20))
    assert diagnose(read_ncu(path)).causes[0].label is Bottleneck.LAUNCH_OVERHEAD
    path.write_text(ncu_csv(*[("my_kernel", 300.0, 20.0, 30.0)] * 3))
    assert not diagnose(read_ncu(path)).healthy  # near no peak


def test_the_default_page_of_ncu_is_read_too(tmp_path: Path) -> None:
    rows = [("Memory Throughput", "Gbyte/second", "1,200"), ("Memory Throughput", "%", "90"), ("Compute (SM) Throughput", "%", "20"),
            ("Duration", "usecond", "1,000")]  # fmt: skip
    lines = ['"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"', *(f'"0","k","{n}","{u}","{v}"' for n, u, v in rows)]
    path = tmp_path / "report.csv"
    path.write_text("\n".join(lines))
    assert read_ncu(path).trace["reached"] == [["k", pytest.approx(1e-3), pytest.approx(0.2), pytest.approx(0.9)]]


def test_what_is_no_report(tmp_path: Path) -> None:
    path = tmp_path / "report.sqlite"
    with pytest.raises(PerftrainError, match="There is no report"):
        read_nsys(path)
    path.write_text("something else, long enough to be a database" * 10)
    with pytest.raises(PerftrainError, match="no SQLite export"):
        read_nsys(path)
    path.unlink()
    sqlite3.connect(path).close()
    with pytest.raises(PerftrainError, match="holds no kernels"):
        read_nsys(path)
    for text in ("", '"ID","Kernel Name"\n"",""\n"0","k"\n', ncu_csv(("k", 1.0, 2.0, 3.0)).replace('"us"', '"parsec"')):
        (tmp_path / "report.csv").write_text(text)
        with pytest.raises(PerftrainError, match="report"):
            read_ncu(tmp_path / "report.csv")


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    busy(marked(Nsys()), (0, 4)).write(tmp_path / "report.sqlite")
    told = run_cli("diagnose", "--nsys", "report.sqlite", "--json", "out.json", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert json.loads((tmp_path / "out.json").read_text())["diagnosis"]["causes"][0]["label"] == "host.python"
    with pytest.raises(PerftrainError, match=r"ncu --import=report.ncu-rep --csv --page=raw > report.csv"):
        nsight.read_report("--ncu", Path("report.ncu-rep"))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(PerftrainError, match=r"no 'nsys' on the PATH"):
        nsight.find("--nsys")
    assert sort_out(["diagnose", "--nsys", "--budget", "60", "train.py", "--ncu"]).program == ("train.py", "--ncu")
    assert sort_out(["diagnose", "--ncu", "recipe=digits"]).flags == {"--ncu": ""}


@pytest.mark.slow
def test_a_program_runs_under_the_tool(tmp_path: Path) -> None:
    """With a stand-in for nsys: what it is asked to do, in which order, and that what it exports is read."""
    busy(marked(Nsys()), (0, 4)).write(tmp_path / "made.sqlite")
    tool = tmp_path / "bin" / "nsys"
    tool.parent.mkdir()
    tool.write_text(
        f"#!{sys.executable}\nimport shutil, subprocess, sys\n"
        f"open({str(tmp_path / 'asked')!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
        "out = next(a for a in sys.argv if a.startswith('--output=')).removeprefix('--output=')\n"
        f"if sys.argv[1] == 'export': shutil.copy({str(tmp_path / 'made.sqlite')!r}, out)\n"
        "else:\n    program = sys.argv[[a.startswith('--') for a in sys.argv[2:]].index(False) + 2:]\n"
        "    code = subprocess.run(program).returncode\n    open(out + '.nsys-rep', 'w').close()\n    sys.exit(code)\n"
    )
    tool.chmod(0o755)
    (tmp_path / "train.py").write_text(
        "import torch\nmodel = torch.nn.Linear(8, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(2000):\n    model(torch.randn(4, 8)).mean().backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
    )
    path = f"{tool.parent}{os.pathsep}{os.environ['PATH']}"
    told = run_cli("diagnose", "--json", "out.json", "--nsys", "train.py", cwd=tmp_path, env={"PATH": path})
    assert told.returncode == 0, told.stderr
    profile, export = (tmp_path / "asked").read_text().splitlines()
    assert profile.startswith("profile --trace=cuda,nvtx")
    assert profile.endswith("train.py")
    assert export.startswith("export --type=sqlite")
    found = json.loads((tmp_path / "out.json").read_text())["diagnosis"]
    assert found["causes"][0]["label"] == "host.python"
    assert found["breakdown"]["forward_share"] > 0.1  # the phases are those of the program itself
