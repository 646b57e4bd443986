"""The machine's peaks for a diagnosis: measured once in a process of their own, then kept in a file."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from perftrain.whole import write_whole

LIMIT_S = 60.0


def known_peaks(file: Path, device: str, threads: int) -> dict[str, Any]:
    """What ``file`` holds, or else what is measured now with so many threads of torch (some 4 s); empty where that fails.

    A process of its own: its threads and memory are not to stay in this one. Nothing else should run meanwhile.
    """
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        pass
    code = (
        "import json, sys, torch; torch.set_num_threads(int(sys.argv[2])); "
        "from perftrain.measure.peaks import peaks; json.dump(peaks(sys.argv[1]), sys.stdout)"
    )
    try:
        done = subprocess.run([sys.executable, "-c", code, device, str(threads)], capture_output=True, text=True, timeout=LIMIT_S)
        found = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {}
    with suppress(OSError):  # a cache that cannot be written: measured again next time
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(found))
    return found
