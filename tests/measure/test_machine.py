"""The machine is described without torch; its peaks are measured, believable, and leave no setting changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from perftrain.facts import PerftrainError
from perftrain.measure import machine
from perftrain.measure import peaks as peaks_module
from perftrain.measure.machine import describe, limits, machine_id, settings, software
from perftrain.measure.peaks import peaks

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /sys")


def rate(peak: dict[str, float]) -> float:
    return peak["amount"] / peak["seconds"]


def fp32_precision() -> str:
    mkldnn: Any = torch.backends.mkldnn
    return mkldnn.matmul.fp32_precision


def in_python(code: str, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **variables}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout


# --- what it is ---
def test_the_description_is_plain_json_and_stable() -> None:
    first = describe()
    assert json.loads(json.dumps(first)) == first == describe()
    assert first["cpu_model"]
    assert 1 <= first["cores_usable"] <= first["cores"]
    assert 2**28 < first["memory_bytes"] <= psutil.virtual_memory().total + 2**26
    assert len(first["gpus"]) == torch.cuda.device_count()


def test_the_id_is_of_the_hardware_alone() -> None:
    here = describe()
    assert len(machine_id(here)) == 12
    assert machine_id(here) == machine_id({**dict(reversed(here.items())), "kernel": "another"})
    assert machine_id(here) != machine_id({**here, "cpu_model": "another"})
    assert machine_id(here) != machine_id({**here, "gpus": [{"name": "H200"}]})


def test_nothing_here_imports_torch() -> None:
    code = "import sys; from perftrain.measure.machine import *; describe(); software(); settings(); limits(); "
    assert in_python(code + "print('torch' in sys.modules)") == "False\n"


@LINUX
def test_cores_obey_the_affinity() -> None:
    code = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
    code += "from perftrain.measure.machine import *; print(describe()['cores_usable'], len(settings()['affinity']))"
    assert in_python(code) == "1 1\n"


GROUPS = {
    "v2": (
        "0::/pod/box\n",
        {"pod/cpu.max": "150000 100000", "pod/box/cpu.max": "max 100000", "memory.max": "max", "pod/memory.max": 2**30},
    ),
    "v1": (
        "9:name=systemd:/\n4:memory:/box\n1:cpu,cpuacct:/box\n",
        {
            "cpu/box/cpu.cfs_quota_us": "150000",
            "cpu/box/cpu.cfs_period_us": "100000",
            "cpu/cpu.cfs_quota_us": "-1",
            "memory/box/memory.limit_in_bytes": 2**30,
            "memory/memory.limit_in_bytes": 9223372036854771712,
        },
    ),
}


@LINUX
@pytest.mark.parametrize("version", GROUPS)
def test_a_containers_limits_are_obeyed(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own, files = GROUPS[version]
    told = {"/proc/self/cgroup": own, **{f"/sys/fs/cgroup/{name}": str(text) for name, text in files.items()}}
    real = machine._text

    def text(file: Path) -> str:
        return told.get(str(file), "").strip() if "cgroup" in str(file) else real(file)

    monkeypatch.setattr(machine, "_text", text)
    monkeypatch.setattr(machine, "core_numbers", lambda: list(range(8)))
    assert machine._cpu_quota() == 1.5
    assert describe()["cores_usable"] == 2
    assert describe()["memory_bytes"] == 2**30


def test_gpus_are_asked_for_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    card = {"name": "NVIDIA H200", "memory_bytes": 150_000_000_000, "capability": "9.0"}
    answers: list[Any] = [SimpleNamespace(stdout=f"a banner\n{json.dumps([card])}\n"), subprocess.TimeoutExpired("python", 120)]

    def run(*arguments: Any, **keywords: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(machine, "_has_gpu_files", lambda: True)
    monkeypatch.setattr(machine, "_torch_build", lambda: {"__version__": "2.14.1", "cuda": "13.0"})
    monkeypatch.setattr(machine.subprocess, "run", run)
    machine._gpus.cache_clear()
    assert describe()["gpus"] == describe()["gpus"] == [card]  # asked once
    machine._gpus.cache_clear()
    assert describe()["gpus"] == []
    assert "PyTorch finds none" in limits()[0]["why"]
    machine._gpus.cache_clear()


def test_the_question_to_torch_can_be_answered() -> None:
    assert len(json.loads(in_python(machine._ASK_TORCH))) == torch.cuda.device_count()


def test_software_agrees_with_what_is_imported() -> None:
    found = software()
    assert found["torch"] == torch.__version__
    assert found["cuda"] == torch.version.cuda
    assert found["python"] == sys.version.split()[0]
    assert found["numpy"]


def test_settings_hold_what_shapes_speed_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "KMP_AFFINITY", "GLIBC_TUNABLES", "LD_PRELOAD", "MALLOC_ARENA_MAX"]
    wanted += ["TORCHINDUCTOR_FREEZING", "TORCH_LOGS", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG"]
    other = ["TORCHELASTIC_RUN_ID", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR", "HOME", "MY_OMP_X", "SECRET_TOKEN"]
    for name in wanted + other:
        monkeypatch.setenv(name, "")
    found = settings()["environment"]
    assert set(wanted) <= set(found)
    assert not set(other) & set(found)


# --- limits ---
def test_limits_are_said_in_words_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in limits():
        assert all(limit[key] for key in ("what", "why", "remedy"))
    monkeypatch.setattr(machine, "_gpus", lambda visible: ())
    monkeypatch.setattr(machine.shutil, "which", lambda program: None)
    monkeypatch.setattr(machine, "_huge_pages", lambda: "never")
    monkeypatch.setattr(machine, "_version", lambda package: None)
    monkeypatch.setattr(machine, "_cpu_info", lambda key: "an old cpu")
    monkeypatch.setattr(machine, "can_reset", lambda device: False)
    monkeypatch.setattr(machine.multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(total=64 * 2**20))
    told = "\n".join(limit["what"] for limit in limits())
    assert len(limits()) == 9 or sys.platform != "linux"
    for word in ("GPU", "compile", "huge pages", "workers start", "bus error", "bfloat16", "peak memory", "dali", "photos"):
        assert word in told


# --- what it can do at most ---
def test_peaks_are_plausible_and_leave_the_settings_alone() -> None:
    before = fp32_precision(), torch.get_float32_matmul_precision()
    found = peaks("cpu", budget_s=1.0)
    assert (fp32_precision(), torch.get_float32_matmul_precision()) == before
    assert {"float32", "bfloat16", "float16"} <= set(found["matmul"])
    assert 1e9 < rate(found["matmul"]["float32"]) < 1e14
    assert 1e8 < rate(found["matmul"]["bfloat16"]) < 1e15
    assert 5e8 < rate(found["copy"]["memory"]) < 5e12
    if "amx_bf16" in describe()["cpu_features"]:
        assert rate(found["matmul"]["bfloat16"]) > 1.5 * rate(found["matmul"]["float32"])


def test_settings_come_back_when_measuring_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks_module, "_best_matmul", lambda *arguments: {"amount": 1.0, "seconds": 0.0})
    before = fp32_precision()
    with pytest.raises(PerftrainError, match="matmul in float32"):
        peaks("cpu", budget_s=0.1)
    assert fp32_precision() == before


@pytest.mark.parametrize(("amount", "seconds"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (1.0, -1.0), (2e17, 1.0), (float("nan"), 1.0)])
def test_nonsense_is_refused(amount: float, seconds: float) -> None:
    with pytest.raises(PerftrainError, match="Seen for a matmul"):
        peaks_module._believable("a matmul", {"amount": amount, "seconds": seconds})


def test_other_devices_are_refused() -> None:
    with pytest.raises(PerftrainError, match="Seen: meta"):
        peaks("meta")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_peaks_of_a_gpu() -> None:
    found = peaks("cuda", budget_s=2.0)
    assert rate(found["matmul"]["bfloat16"]) > rate(found["matmul"]["float32"])
    assert set(found["copy"]) == {"memory", "host_to_device", "device_to_host"}
    assert rate(found["copy"]["memory"]) > rate(found["copy"]["host_to_device"])
