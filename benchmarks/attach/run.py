"""What watching costs: a script's own rate alone and watched, in pairs of fresh runs.

    python benchmarks/attach/run.py [--pairs 8] [--width 256]

The script trains a small network in steps of about 5 ms and times itself, after a warm-up, without knowing whether it is
watched. Written to results/<machine>-<date>.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

from perftrain.attach.launch import watch
from perftrain.attach.orders import Orders
from perftrain.compare.job import steady_malloc
from perftrain.measure import machine
from perftrain.measure.statistics import estimate

RESULTS = Path(__file__).parent / "results"
SCRIPT = """
import sys, time, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
torch.set_num_threads(1)
width, out = int(sys.argv[1]), sys.argv[2]
layers = [m for _ in range(8) for m in (nn.Linear(width, width), nn.ReLU())]
model = nn.Sequential(nn.Linear(64, width), *layers, nn.Linear(width, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(4096, 64), torch.randint(0, 8, (4096,))), batch_size=32, shuffle=True)
steps, began = 0, 0.0
while steps < 1200:
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
        if steps == 200:
            began = time.perf_counter()
open(out, "w").write(str((time.perf_counter() - began) / (steps - 200)))
"""


def step_s(script: Path, width: int, watched: bool, folder: Path) -> float:
    out = folder / "step_s"
    arguments = [str(script), str(width), str(out)]
    steady = {"GLIBC_TUNABLES": steady_malloc(os.environ.get("GLIBC_TUNABLES", ""))}  # else two equal runs differ by a tenth
    if watched:
        watch(arguments, Orders(trace=False, to_the_end=True), lambda steps, s: None, 300, quiet=True, environment=steady)
    else:
        subprocess.run([sys.executable, *arguments], check=True, env={**os.environ, **steady})
    return float(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--width", type=int, default=640)
    options = parser.parse_args()
    rng, ratios, alone = random.Random(0), [], []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        for number in range(options.pairs):
            found = {w: step_s(script, options.width, w, Path(folder)) for w in rng.sample([True, False], 2)}
            ratios.append([math.log(found[True] / found[False])])
            alone.append(found[False])
            print(f"pair {number + 1}: {1e3 * found[False]:.3f} ms alone, {1e3 * found[True]:.3f} ms watched", flush=True)
    e = estimate(ratios)
    described = machine.describe()
    result = {
        "machine": described.get("cpu_model"), "torch": machine.software().get("torch"), "date": date.today().isoformat(),
        "command": "python benchmarks/attach/run.py", "pairs": options.pairs, "step_ms_alone": 1e3 * sum(alone) / len(alone),
        "watched_over_alone": e.speedup, "ci95": [e.low, e.high],
    }  # fmt: skip
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{machine.machine_id(described)}-{result['date']}.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
