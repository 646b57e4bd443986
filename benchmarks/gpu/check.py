"""Does this version do on a CUDA machine what it says? One prepared script, within eight minutes.

    python benchmarks/gpu/check.py             # writes results/<gpu>-<date>.md and .json
    python benchmarks/gpu/check.py --dry-run   # the same code on the CPU, tiny: for checking this script

Every check runs in a process of its own with a time limit, so one that fails or hangs does not stop the rest. First the
switches are checked on a small convolutional network (losses beside the baseline's, and whether the setting is really in
force), then the meter, the delay and the measured peaks, then ``python -m perftrain`` gives verdicts on two recipes.
The exit code is the number of checks that failed (at most 100); 2 with one line where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TOTAL_S = 8 * 60 - 15  # the rest is for writing and for ending processes
CHECK_S = 90.0  # of one check at most
MARK = "CHECK-RESULT "
LARGE = ("resnet50", "vit_b_16", "gpt2")
VERDICTS = [
    ("digits", "nothing"),
    ("digits", "delay"),
    ("photos", "workers"),
    ("resnet50", "amp"),
    ("resnet50", "[amp,channels_last]"),
    ("vit_b_16", "amp"),
    ("gpt2", "amp"),
    ("gpt2", "fused"),
    ("gpt2", "[amp,compile]"),  # the last takes longest
]


class Failed(AssertionError):
    """What was checked is not so."""


def require(condition: Any, message: str) -> None:
    if not condition:
        raise Failed(message)


# --- the small program ---
def workload(seed: int, shuffle: bool = True) -> Any:
    """A convolutional network on images made up: ten patterns with noise on them, which it learns within 30 steps."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from perftrain import Workload

    data = torch.Generator().manual_seed(0)
    patterns = torch.randn(10, 3, 32, 32, generator=data)
    labels = torch.randint(10, (1024,), generator=data)
    images = patterns[labels] + 2 * torch.randn(1024, 3, 32, 32, generator=data)
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(1024, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(TensorDataset(images, labels), batch_size=64, shuffle=shuffle, drop_last=True)
    return Workload(model, optimizer, loader, loss_fn=nn.functional.cross_entropy, clip_norm=10.0)


def trained(device: str, steps: int, seed: int = 0, opt: Sequence[Any] = (), look: Callable[[Any], None] | None = None) -> Any:
    """The small program, trained. ``look`` is given the trainer before the first step."""
    from perftrain import Trainer
    from perftrain.engine.process import seed_everything

    seed_everything(seed)
    work = workload(seed)
    trainer = Trainer(work.model, work.loss_fn, work.optimizer, work.loader, opt=list(opt), clip_norm=work.clip_norm, device=device)
    if look:
        look(trainer)
    seed_everything(seed)
    trainer.fit(steps=steps)
    return trainer


def losses(trainer: Any) -> list[float]:
    return trainer.meter.losses()["loss"]


def compared(device: str, steps: int, switch: Any, look: Callable[[Any], None] | None = None) -> dict[str, Any]:
    """The switch's losses beside the baseline's, as the verdict would judge them; fails where they do not hold."""
    from perftrain.compare.parity import judge

    baseline = {str(seed): losses(trained(device, steps, seed)) for seed in range(3)}
    repeat = losses(trained(device, steps, 0))
    variant = losses(trained(device, steps, 0, [switch], look))
    parity = judge(switch.card.numerics, variant, baseline, repeat)
    first, last = baseline["0"][0], baseline["0"][-1]
    require(last < first, f"the baseline itself does not learn: loss {first:.3f} to {last:.3f}")
    require(parity.holds, f"{parity.detail}; last losses {last:.4f} (baseline), {variant[-1]:.4f} ({switch.card.name})")
    return {"parity": parity.detail, "loss": f"{first:.3f} -> {last:.4f}, with the switch {variant[-1]:.4f}"}


# --- checks of switches: each returns what it saw ---
def check_amp(device: str, steps: int, dtype: str) -> dict[str, Any]:
    import torch

    from perftrain import opt

    seen: set[torch.dtype] = set()

    def look(trainer: Any) -> None:
        trainer.model[0].register_forward_hook(lambda _m, _i, output: seen.add(output.dtype))

    found = compared(device, steps, opt.AMP(dtype=dtype), look)
    require(seen == {getattr(torch, dtype)}, f"the convolution gave {seen}, not {dtype}")
    return {**found, "convolution output": dtype}


def check_amp_bfloat16(device: str, steps: int) -> dict[str, Any]:
    return check_amp(device, steps, "bfloat16")


def check_amp_float16(device: str, steps: int) -> dict[str, Any]:
    return check_amp(device, steps, "float16")


def check_tf32(device: str, steps: int) -> dict[str, Any]:
    import torch

    from perftrain import opt
    from perftrain.opt.tf32 import _settings

    def state() -> dict[str, str]:
        return {name: setting.fp32_precision for name, setting in _settings(torch.device(device).type)}

    def error() -> float:
        left, right = (torch.randn(512, 512, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
        exact = left.double() @ right.double()
        product = (left.to(device) @ right.to(device)).double().cpu()
        return float((product - exact).norm() / exact.norm())

    before, inside = state(), {}
    own_error = error()

    def look(trainer: Any) -> None:
        trainer.model[0].register_forward_hook(lambda *_: inside.update(state()))

    found = compared(device, steps, opt.TF32(), look)
    require(set(inside.values()) == {"tf32"}, f"while training the settings were {inside}")
    require(state() == before, f"after training the settings are {state()}; before they were {before}")
    with opt.TF32().process():
        tf32_error = error()
    require(error() == own_error, "float32 products are not what they were before the switch")
    if torch.device(device).type == "cuda":
        require(own_error < 1e-5, f"float32 products without the switch have a relative error of {own_error:.1e}: TF32 is on already")
        require(1e-5 < tf32_error < 1e-2, f"TF32 products have a relative error of {tf32_error:.1e}; 1e-5 to 1e-2 was expected")
    return {**found, "before": before, "relative error": f"{own_error:.1e} without, {tf32_error:.1e} with"}


def check_channels_last(device: str, steps: int) -> dict[str, Any]:
    import torch

    from perftrain import opt

    seen: set[str] = set()

    def look(trainer: Any) -> None:
        second = trainer.model[3]
        strides = second.weight.stride()
        require(strides[1] == 1, f"the second convolution's weight has strides {strides}; channels should have stride 1")

        def note(_module: Any, inputs: Any, output: Any) -> None:
            for what, tensor in (("input", inputs[0]), ("output", output)):
                seen.add(f"{what} {'NHWC' if tensor.is_contiguous(memory_format=torch.channels_last) else 'NCHW'}")

        trainer.model[0].register_forward_hook(note)
        second.register_forward_hook(note)

    found = compared(device, steps, opt.ChannelsLast(), look)
    require(seen == {"input NHWC", "output NHWC"}, f"activations are {sorted(seen)}")
    return {**found, "activations": sorted(seen)}


def check_compile(device: str, steps: int) -> dict[str, Any]:
    from torch._dynamo.utils import counters

    from perftrain import opt

    begin = time.perf_counter()
    found = compared(device, steps, opt.Compile())
    graphs = counters["stats"]["unique_graphs"]
    breaks = sum(counters["graph_break"].values())
    require(graphs >= 1, "nothing was compiled")
    return {**found, "graphs": graphs, "graph breaks": breaks, "seconds": round(time.perf_counter() - begin, 1)}


def check_workers(device: str, steps: int) -> dict[str, Any]:
    from perftrain import opt

    return compared(device, steps, opt.Workers(num_workers=2))


def check_nothing(device: str, steps: int) -> dict[str, Any]:
    from perftrain import opt

    return compared(device, steps, opt.Nothing())


OWN_CHECK = ("amp", "tf32", "channels_last", "compile", "workers", "nothing", "delay")
SEVERAL_RANKS = ("ddp", "fsdp")
"""One device has no second rank; their own tests run on the CPU."""


def check_every_switch(device: str, steps: int) -> dict[str, Any]:
    """Every other switch on the small program: it refuses with a reason, or its losses are what its card says."""
    import torch

    from perftrain.facts import PerftrainError
    from perftrain.opt import all_switches
    from perftrain.opt.seams import Plan

    plan, saw, wrong = Plan(device=torch.device(device)), {}, []
    for name, cls in all_switches().items():
        if name in OWN_CHECK or name in SEVERAL_RANKS:
            continue
        switch = cls()
        reason = switch.unavailable(plan)
        if reason or switch.environment():
            saw[name] = f"not run: {reason or 'it works through variables'}"
            continue
        try:
            saw[name] = compared(device, steps, switch)["parity"]
        except PerftrainError as refused:
            saw[name] = f"refused: {refused}"
        except Exception as error:
            saw[name] = f"{type(error).__name__}: {error}"
            wrong.append(name)
        print(name, saw[name], flush=True)
    require(not wrong, "; ".join(f"{name}: {saw[name]}" for name in wrong))
    return saw


def check_prefetch(device: str, steps: int) -> dict[str, Any]:
    """Copies on a stream of their own must not change what is trained, batch after batch, and must overlap the training."""
    from perftrain import opt

    names = [opt.PinMemory(), opt.DevicePrefetch()] if device.startswith("cuda") else [opt.Nothing()]
    plain, ahead = losses(trained(device, 2 * steps, 0)), losses(trained(device, 2 * steps, 0, names))
    apart = max(abs(a - b) for a, b in zip(plain, ahead, strict=True))
    require(apart <= 1e-3 * max(plain), f"losses differ by {apart:.2e}: a batch was trained on before its copy was done")
    return {"largest difference of the losses": f"{apart:.1e}"}


def check_model(device: str, steps: int, name: str, bundles: Sequence[Sequence[str]]) -> dict[str, Any]:
    """A large model on batches that stay on the device: milliseconds, useful FLOP/s against the peak, memory, by bundle."""
    import torch

    sys.path.insert(0, str(HERE))
    import yaml
    from hydra.utils import instantiate

    from perftrain import Trainer
    from perftrain.measure.flops import count_flop, model_flop_utilization
    from perftrain.measure.peaks import peaks
    from perftrain.opt import all_switches

    cuda = device.startswith("cuda")
    tiny = (
        {}
        if cuda
        else {"batch_size": 2, **({} if name != "gpt2" else {"length": 64, "layers": 2, "width": 64, "heads": 4, "vocabulary": 512})}
    )
    recipe = instantiate({**yaml.safe_load((HERE / "conf" / "recipe" / f"{name}.yaml").read_text()), **tiny})
    peak = peaks(device, budget_s=2.0 if cuda else 0.5)["matmul"]
    saw: dict[str, Any] = {}
    flop = 0
    for bundle in bundles:
        work = recipe.build(0)
        trainer = Trainer(
            work.model, work.loss_fn, work.optimizer, work.loader, opt=[all_switches()[s]() for s in bundle], device=device,
            samples_in=work.samples_in,
        )  # fmt: skip
        if not bundle:
            batch = next(iter(work.loader))
            flop = count_flop(lambda t=trainer, b=batch: t.run.functions.forward(b)["loss"].backward())
            trainer.optimizer.zero_grad()
        trainer.fit(steps=12 if cuda else 3)
        record = trainer.fit(steps=steps if cuda else 3)
        now, low = record.breakdown, "amp" in bundle
        mfu = model_flop_utilization(flop, now.step_s, peak["bfloat16" if low else "float32"]) if cuda else float("nan")
        saw[" + ".join(bundle) or "no switches"] = (
            f"{1e3 * now.step_s:.2f} ms, {now.samples / now.steps / now.step_s:.0f} samples/s, {flop / now.step_s / 1e12:.1f} TFLOP/s, "
            f"{mfu:.0%} of the {'bfloat16' if low else 'float32'} peak, {(record.peak_bytes or 0) / 2**30:.1f} GiB"
        )
        require(all(math.isfinite(x) for x in trainer.meter.losses()["loss"]), f"{bundle}: a loss is not finite")
        del trainer, work
        if cuda:
            torch.cuda.empty_cache()
    return saw


def check_resnet50(device: str, steps: int) -> dict[str, Any]:
    return check_model(device, steps, "resnet50", [[], ["amp"], ["amp", "channels_last"], ["amp", "channels_last", "fused"]])


def check_vit(device: str, steps: int) -> dict[str, Any]:
    return check_model(device, steps, "vit_b_16", [[], ["amp"], ["amp", "fused"], ["amp", "checkpointing"]])


def check_gpt2(device: str, steps: int) -> dict[str, Any]:
    return check_model(device, steps, "gpt2", [[], ["tf32"], ["amp"], ["amp", "fused"], ["amp", "chunked_loss"], ["amp", "checkpointing"]])


# --- checks of the instrument ---
def check_meter(device: str, steps: int) -> dict[str, Any]:
    """On CUDA the phases are times between events: together they must be the wall time, from idle device to idle device."""
    import torch

    def wait() -> None:
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()

    trainer = trained(device, 20)
    steps = max(100, 5 * steps) if torch.device(device).type == "cuda" else steps
    marks: list[float] = []
    real_start, real_finish = trainer.meter.__class__.start, trainer.meter.__class__.finish

    def start(self: Any) -> None:
        wait()
        marks[:] = [time.perf_counter()]
        real_start(self)

    def finish(self: Any) -> None:
        wait()
        if len(marks) == 1:
            marks.append(time.perf_counter())
        real_finish(self)

    cls = trainer.meter.__class__
    try:
        cls.start, cls.finish = start, finish
        trainer.fit(steps=steps)
    finally:
        cls.start, cls.finish = real_start, real_finish
    rows = trainer.rows
    measured, wall = sum(row.step_s for row in rows), marks[1] - marks[0]
    off = measured / wall - 1
    require(len(rows) == steps, f"{len(rows)} rows for {steps} steps")
    require(abs(off) < 0.02, f"phases add up to {1e3 * measured:.2f} ms, the wall clock says {1e3 * wall:.2f} ms ({off:+.1%})")
    require(all(s >= 0 for row in rows for s in row.phase_s.values()), "a phase has a negative time")
    shares = {name: round(trainer.record.breakdown.share(name), 4) for name in trainer.record.breakdown.phase_s}
    for phase in ("forward", "backward", "optimizer"):
        require(shares.get(phase, 0) > 0.01, f"{phase} takes {shares.get(phase, 0):.1%} of a step: {shares}")
    return {"steps": steps, "phases beside wall time": f"{off:+.2%}", "shares": shares, "step": str(trainer.record.breakdown)}


def check_delay(device: str, steps: int) -> dict[str, Any]:
    """Three rounds of ABBA in one process: the slowdown must be the fraction asked for, give or take a fifth of it."""
    from perftrain import opt

    fraction = 0.5
    ratios = []
    for _ in range(3):
        middle_s: dict[bool, float] = {False: 0.0, True: 0.0}
        for delayed in (False, True, True, False):
            switches = [opt.Delay(fraction=fraction, phase="optimizer")] if delayed else []
            rows = trained(device, 2 * steps, 0, switches).rows
            middle_s[delayed] += statistics.median(row.step_s for row in rows[steps // 2 :])
        ratios.append(middle_s[True] / middle_s[False])
    ratio = statistics.median(ratios)
    rounds = ", ".join(f"{r:.2f}" for r in ratios)
    saw = f"steps are {ratio:.3f} times as long with a delay of {fraction:.0%} (the rounds: {rounds})"
    require(abs(ratio - 1 - fraction) < 0.2 * fraction, saw)
    return {"saw": saw}


def check_peaks(device: str, steps: int) -> dict[str, Any]:
    from perftrain.measure.peaks import peaks

    found = peaks(device, budget_s=4.0 if device.startswith("cuda") else 0.5)
    rates = {f"{kind} {name}": peak["amount"] / peak["seconds"] for kind, many in found.items() for name, peak in many.items()}
    shown = {name: f"{rate / 1e12:.4g} T{'FLOP' if name.startswith('matmul') else 'B'}/s" for name, rate in rates.items()}
    if device.startswith("cuda"):
        require(rates["matmul bfloat16"] > 2 * rates["matmul float32"], f"bfloat16 should be over twice float32: {shown}")
        require(rates["copy memory"] > 2 * rates["copy host_to_device"], f"device memory should be far faster than the bus: {shown}")
    return shown


CHECKS: dict[str, Callable[[str, int], dict[str, Any]]] = {
    "nothing": check_nothing,
    "amp bfloat16": check_amp_bfloat16,
    "amp float16": check_amp_float16,
    "tf32": check_tf32,
    "channels_last": check_channels_last,
    "workers": check_workers,
    "meter": check_meter,
    "delay": check_delay,
    "peaks": check_peaks,
    "compile": check_compile,
    "every switch": check_every_switch,
    "prefetch": check_prefetch,
    "resnet50": check_resnet50,
    "vit_b_16": check_vit,
    "gpt2": check_gpt2,
}


def one(name: str, device: str, steps: int) -> int:
    """A check, in this process; the last line of the output is what it found."""
    try:
        result = {"ok": True, "facts": CHECKS[name](device, steps)}
    except Failed as failure:
        result = {"ok": False, "why": str(failure)}
    except Exception:
        result = {"ok": False, "why": traceback.format_exc().strip()}
    print("\n" + MARK + json.dumps(result, default=str), flush=True)
    return 0 if result["ok"] else 1


# --- the parent: processes with a time limit ---
def run_limited(command: Sequence[str], limit_s: float, cwd: Path | None = None) -> tuple[int | None, str]:
    """Exit code (None: it took too long and was ended with all it had started) and output."""
    with tempfile.TemporaryFile("w+") as log:
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=cwd, env=variables, start_new_session=True)
        try:
            code: int | None = process.wait(max(1.0, limit_s))
        except subprocess.TimeoutExpired:
            code = None
        except KeyboardInterrupt:
            end(process)
            raise
        if code is None:
            end(process)
        log.seek(0)
        return code, log.read()


def end(process: subprocess.Popen[Any]) -> None:
    """End a process and its children: politely first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)


def run_check(name: str, device: str, steps: int, left_s: float) -> dict[str, Any]:
    begin = time.monotonic()
    command = [sys.executable, str(Path(__file__).resolve()), "--one", name, "--device", device, "--steps", str(steps)]
    limit_s = min(CHECK_S, left_s)
    code, output = run_limited(command, limit_s)
    lines = [line for line in output.splitlines() if line.startswith(MARK)]
    if lines:
        result = json.loads(lines[-1][len(MARK) :])
    elif code is None:
        result = {"ok": False, "why": f"not done after {limit_s:.0f} s: {tail(output)}"}
    else:
        result = {"ok": False, "why": f"ended with {code}: {tail(output)}"}
    return {"check": name, **result, "seconds": round(time.monotonic() - begin, 1)}


def run_verdict(recipe: str, switch: str, device: str, folder: Path, budget_s: float, left_s: float) -> dict[str, Any]:
    """``python -m perftrain`` as a user types it. It passes if there is a verdict that this switch can have here."""
    begin = time.monotonic()
    file = folder / f"{recipe}-{re.sub(r'[^a-z0-9_]+', '-', switch)}.json"
    command = [
        *(sys.executable, "-m", "perftrain", f"recipe={recipe}", f"device={device}", f"+opt={switch}"),
        *(("--config-dir", str(HERE / "conf")) if recipe in LARGE else ()),
        *("--budget", f"{budget_s:.0f}", "--runs", str(folder / "runs"), "--json", str(file), "measure.processes=2"),
    ]
    code, output = run_limited(command, left_s, folder)
    row: dict[str, Any] = {
        "check": f"verdict {recipe} {switch}",
        "budget_s": round(budget_s),
        "seconds": round(time.monotonic() - begin, 1),
    }
    if code is None:
        return {**row, "ok": False, "why": f"not done after {left_s:.0f} s: {tail(output)}"}
    if (recipe, switch) == ("digits", "channels_last"):  # a network without convolutions: refused, or a verdict that says so
        verdict = json.loads(file.read_text())["verdict"] if file.exists() else {}
        refused = code == 2 or verdict.get("decision") == "does_not_run"
        said = verdict.get("reason") or tail(output)
        return {**row, "ok": refused, "why": "" if refused else f"it should be refused: {said}", "facts": {"saw": said}}
    if code != 0 or not file.exists():
        return {**row, "ok": False, "why": f"exit code {code}: {tail(output)}"}
    verdict = json.loads(file.read_text())["verdict"]
    wrong = unexpected(switch, verdict)
    facts = {key: verdict.get(key) for key in ("decision", "speedup", "ci95", "resolution", "pairs", "processes", "reason")}
    return {**row, "ok": not wrong, "why": wrong, "facts": facts, "verdict": verdict}


def unexpected(switch: str, verdict: dict[str, Any]) -> str:
    """Why a verdict cannot be right; empty where it can. Speed is only known beforehand for the two controls."""
    decision, ci95 = verdict["decision"], verdict.get("ci95")
    if decision in ("does_not_run", "changes_result"):
        return f"{decision}: {verdict['reason']}"
    if switch == "nothing" and decision in ("faster", "slower"):
        return f"a program is not {decision} than itself: {verdict['reason']}"
    if switch == "delay" and ci95 and decision != "not_resolved" and not ci95[0] <= 1 / 1.05 <= ci95[1]:
        return f"a delay of 5 % is a speedup of 0.952, which the interval does not hold: {verdict['reason']}"
    return ""


def tail(output: str, lines: int = 12) -> str:
    return "\n".join([line for line in output.splitlines() if line.strip()][-lines:])


# --- results ---
def describe(device: str) -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device,
        "cores": os.cpu_count(),
    }
    if device.startswith("cuda"):
        gpu = torch.cuda.get_device_properties(device)
        facts |= {
            "gpu": gpu.name,
            "compute_capability": f"{gpu.major}.{gpu.minor}",
            "memory_gib": round(gpu.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return facts


def markdown(about: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    failed = [row for row in rows if not row["ok"]]
    lines = [f"# Checks on {about.get('gpu', about['device'])}, {about['date']}", "", f"`{about['command']}`", ""]
    lines += [f"- {key}: {value}" for key, value in about.items() if key not in ("command", "date")]
    lines += ["", f"{len(rows) - len(failed)} of {len(rows)} checks passed.", "", "| check | | seconds | saw |", "|--|--|--|--|"]
    for row in rows:
        facts = row.get("facts") or {}
        saw = "; ".join(f"{key}: {value}" for key, value in facts.items() if value is not None) or tail(row.get("why", ""), 1)
        saw = " ".join(saw.replace("|", "/").split())
        outcome = "passed" if row["ok"] else "**failed**"
        lines.append(f"| {row['check']} | {outcome} | {row['seconds']} | {saw} |")
    for row in failed:
        lines += ["", f"## {row['check']}", "", "```", row["why"], "```"]
    return "\n".join(lines) + "\n"


def save(stem: Path, about: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_name(stem.name + ".json").write_text(json.dumps({"schema": 1, "about": about, "checks": list(rows)}, indent=1) + "\n")
    stem.with_name(stem.name + ".md").write_text(markdown(about, rows))


def main() -> int:
    parser = argparse.ArgumentParser(description="Check perftrain on a CUDA machine; see README.md beside this file.")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU with tiny settings, to check this script")
    parser.add_argument("--out", type=Path, help="FILE.md and FILE.json are written (default: results/<gpu>-<date>)")
    parser.add_argument("--only", default="", help="checks whose name contains this")
    parser.add_argument("--one", choices=list(CHECKS), help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=30, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        return one(given.one, given.device, given.steps)
    begin = time.monotonic()
    import torch

    device, steps = ("cpu", 12) if given.dry_run else ("cuda", 30)
    if device == "cuda" and not torch.cuda.is_available():
        print(f"This check needs a CUDA device; torch {torch.__version__} sees none here (--dry-run tries the script on the CPU).")
        return 2
    total_s = 240.0 if given.dry_run else TOTAL_S
    about = {**describe(device), "date": datetime.date.today().isoformat(), "command": " ".join(["python", *sys.argv])}
    name = re.sub(r"[^a-z0-9]+", "-", str(about.get("gpu", "dry-run-cpu")).lower()).strip("-")
    stem = given.out or (Path(tempfile.gettempdir()) if given.dry_run else HERE / "results") / f"{name}-{about['date']}"
    verdicts = [("digits", "nothing"), ("digits", "channels_last")] if given.dry_run else VERDICTS
    tasks = [("check", name, "") for name in CHECKS] + [("verdict", recipe, switch) for recipe, switch in verdicts]
    tasks = [task for task in tasks if given.only in " ".join(task)]
    rows: list[dict[str, Any]] = []
    folder = Path(tempfile.mkdtemp(prefix="perftrain-check-"))
    try:
        for number, (kind, first, second) in enumerate(tasks):
            left_s = total_s - (time.monotonic() - begin)
            if left_s < 5:
                rows.append({"check": f"{kind} {first} {second}".strip(), "ok": False, "why": "no time left for it", "seconds": 0.0})
            elif kind == "check":
                rows.append(run_check(first, device, steps, left_s))
            else:
                # A verdict takes half a minute around its timing; what is left is shared out evenly.
                share_s = left_s / (len(tasks) - number)
                rows.append(run_verdict(first, second, device, folder, min(45.0, max(8.0, share_s - 12)), min(left_s, 3 * share_s)))
            row = rows[-1]
            outcome = "passed" if row["ok"] else "FAILED: " + tail(row["why"], 1)
            print(f"[{time.monotonic() - begin:4.0f} s] {row['check']}: {outcome}", flush=True)
            save(stem, about, rows)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    failed = sum(not row["ok"] for row in rows)
    print(f"{len(rows) - failed} of {len(rows)} passed, in {time.monotonic() - begin:.0f} s: {stem}.md")
    return min(failed, 100)


if __name__ == "__main__":
    sys.exit(main())
