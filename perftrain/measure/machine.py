"""What this machine is, and what cannot run on it.

All of it is cheap, imports no torch and never touches a GPU from this process: the process that only coordinates
measurements calls it, and a CUDA context there would take memory from what is measured.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import math
import multiprocessing
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from perftrain.cores import core_numbers
from perftrain.measure.memory import can_reset

_CPU_FEATURES = {"avx2", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_bf16", "amx_fp16", "amx_int8"} | {
    *("asimd", "bf16", "i8mm", "sve", "sve2")  # ARM
}
_FAST_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}
_SHAPES_SPEED = re.compile(
    "((G?OMP|MKL|KMP|OPENBLAS|DNNL|ONEDNN|GLIBC|MALLOC|(PY)?TORCH|CUDA|CUDNN|CUBLAS|NVIDIA|NCCL|TRITON)_|TORCH|LD_PRELOAD$)"
)
_NOT_ABOUT_SPEED = re.compile(
    "TORCHELASTIC_|TORCH_HOME$|(TORCHINDUCTOR|TRITON)_CACHE_DIR$|NVIDIA_(VISIBLE|REQUIRE|DRIVER|PRODUCT)|CUDA_(HOME|PATH|VERSION)"
)
"""Names of launches and of places: they change from run to run (torch sets some itself) and say nothing about speed."""


def describe() -> dict[str, Any]:
    """The machine as a process here may use it: processor, cores, memory, system, GPUs.

    ``cores_usable`` obeys the CPU affinity and the limit of the container. ``memory_bytes`` obeys the container's limit and is
    rounded to 64 MiB, since what a kernel keeps for itself differs from boot to boot. ``gpus`` are those PyTorch may use.
    """
    quota = _cpu_quota()
    limits = (int(text) for file in _cgroup_files("memory", "memory.limit_in_bytes", "memory.max") if (text := _text(file)).isdigit())
    system = platform.system()
    with suppress(OSError):
        system = platform.freedesktop_os_release()["PRETTY_NAME"]
    return {
        "cpu_model": _cpu_info("model name") or platform.processor() or platform.machine(),
        "cpu_features": sorted(_CPU_FEATURES & set((_cpu_info("flags") or _cpu_info("Features")).split())),
        "cores": psutil.cpu_count() or 1,
        "cores_usable": min(len(core_numbers()), math.ceil(quota) if quota else sys.maxsize),
        "memory_bytes": round(min(psutil.virtual_memory().total, *limits) / 2**26) * 2**26,
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1,
        "os": system,
        "kernel": platform.release(),
        "gpus": [dict(gpu) for gpu in _gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))],
    }


def machine_id(machine: Mapping[str, Any]) -> str:
    """Twelve hex digits of the hardware that :func:`describe` found. The system is software and stays out."""
    hardware = {key: value for key, value in machine.items() if key not in ("os", "kernel")}
    return hashlib.sha256(json.dumps(hardware, sort_keys=True).encode()).hexdigest()[:12]


def software() -> dict[str, str | None]:
    """Versions of what the speed depends on, None where it is not installed. Imports none of it."""
    torch_build = _torch_build()
    cuda = torch_build.get("cuda")
    packages = ("torchvision", "torchdata", "triton", "numpy", "perftrain")
    driver = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", _text(Path("/proc/driver/nvidia/version")))
    return {
        "python": platform.python_version(),
        "torch": torch_build.get("__version__"),
        **{name: _version(name) for name in packages},
        "cuda": cuda,
        "cudnn": _version(f"nvidia-cudnn-cu{cuda.partition('.')[0]}") if cuda else None,
        "hip": torch_build.get("hip"),
        "nvidia_driver": driver[1] if driver else None,
    }


def settings() -> dict[str, Any]:
    """What shapes the speed of a process that starts now: variables, CPU affinity, huge pages, CPU frequency governor."""
    variables = {k: v for k, v in sorted(os.environ.items()) if _SHAPES_SPEED.match(k) and not _NOT_ABOUT_SPEED.match(k)}
    return {
        "environment": variables,
        "affinity": core_numbers(),
        "huge_pages": _huge_pages(),
        "governor": _text(Path(f"/sys/devices/system/cpu/cpu{core_numbers()[0]}/cpufreq/scaling_governor")) or None,
    }


def limits() -> list[dict[str, str]]:
    """What cannot run here, or not well: ``what``, ``why``, and ``remedy`` (what to do or type), in words."""
    machine = describe()
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    shm_bytes = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None
    thp = "/sys/kernel/mm/transparent_hugepage/enabled"
    slow_bf16 = not machine["gpus"] and not _FAST_BF16 & set(machine["cpu_features"])
    no_dali = not any(_version(f"nvidia-dali-cuda{cuda}") for cuda in (110, 120, 130))
    small_shm = shm_bytes is not None and shm_bytes < 2**30
    spawns = "fork" not in multiprocessing.get_all_start_methods()
    shm = f"/dev/shm, through which batches travel, has {(shm_bytes or 0) // 2**20} MiB"
    torchvision = _version("torchvision")
    table = [
        (not machine["gpus"], "switches that need a GPU do not run", _why_no_gpu(), "use a machine with a GPU"),
        (not shutil.which(compiler.split()[0]), "+opt=compile does not run", f"no {compiler} on PATH", "install g++, or set CXX"),
        (_huge_pages() in (None, "never"), "malloc gets no huge pages: timings scatter", f"see {thp}", f"echo madvise > {thp}"),
        (spawns, "loader workers start slowly", "this system has no fork", "set persistent_workers=True"),
        (small_shm, "loader workers may die of a bus error", shm, "docker run --shm-size=8g ..."),
        (slow_bf16, "bfloat16 is hardly faster", "no AMX, AVX512_BF16 or ARM bf16 in this processor", "stay with float32"),
        (
            not can_reset("cpu"),
            "peak memory counts from the start",
            "/proc/self/clear_refs is locked",
            "use fresh processes",
        ),
        (no_dali, "+opt=dali does not run", "DALI is not installed", "pip install 'perftrain[dali]'"),
        (not torchvision, "recipe=photos does not run", "torchvision is not installed", "pip install 'perftrain[recipes]'"),
    ]
    return [{"what": what, "why": why, "remedy": remedy} for here, what, why, remedy in table if here]


def _why_no_gpu() -> str:
    build = _torch_build()
    if not (build.get("cuda") or build.get("hip")):
        return f"PyTorch {build.get('__version__')} is built without CUDA"
    if not _has_gpu_files():
        return "no GPU: neither /dev/nvidia* nor /dev/kfd exists"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return f"there is a GPU, but PyTorch finds none: is the driver too old, or hidden by CUDA_VISIBLE_DEVICES={visible}?"


def _text(file: Path) -> str:
    """The content without white space at its ends; empty where the file is missing or locked."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _cpu_info(key: str) -> str:
    match = re.search(rf"^{key}\s*:\s*(.*)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    return match[1] if match else ""


def _huge_pages() -> str | None:
    mode = re.search(r"\[(\w+)\]", _text(Path("/sys/kernel/mm/transparent_hugepage/enabled")))
    return mode[1] if mode else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_build() -> dict[str, str]:
    """``__version__``, ``cuda``, ``hip`` of the installed torch, read from its version.py: the metadata leave out ``+cu130``."""
    spec = importlib.util.find_spec("torch")
    source = _text(Path(spec.origin).with_name("version.py")) if spec and spec.origin else ""
    return dict(re.findall(r"^(\w+)(?:: [^=]+)? = '([^']*)'$", source, re.MULTILINE))


def _cgroup_files(controller: str, v1: str, v2: str) -> Iterator[Path]:
    """The limit files of this process's control group and of every group above it: the tightest one rules."""
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, group = line.split(":", 2)
        if controller in controllers.split(",") or not controllers:
            base = Path("/sys/fs/cgroup") / (controller if controllers else "")
            folder = base / group.lstrip("/")
            yield from (f / (v1 if controllers else v2) for f in (folder, *folder.parents) if f.is_relative_to(base))


def _cpu_quota() -> float | None:
    """Cores' worth of time that a container may use, where it is limited."""
    quotas = []
    for file in _cgroup_files("cpu", "cpu.cfs_quota_us", "cpu.max"):
        quota, _, period = _text(file).partition(" ")
        period = period or _text(file.with_name("cpu.cfs_period_us"))
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _has_gpu_files() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists() or Path("/dev/dxg").exists() or sys.platform == "win32"


_ASK_TORCH = """
import json, torch
found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps([{"name": p.name, "memory_bytes": p.total_memory, "capability": f"{p.major}.{p.minor}"} for p in found]))
"""


@cache
def _gpus(visible: str | None) -> tuple[Mapping[str, Any], ...]:
    """A process of its own asks torch: right about MIG slices, ROCm and CUDA_VISIBLE_DEVICES, and no CUDA context is left here.

    Takes seconds, therefore once per value of CUDA_VISIBLE_DEVICES, and only where there may be a GPU that torch can use.
    """
    build = _torch_build()
    if not ((build.get("cuda") or build.get("hip")) and _has_gpu_files()):
        return ()
    try:
        asked = subprocess.run([sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=120, check=True)
        return tuple(json.loads(asked.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return ()
