"""Keep one core busy in random bursts of 0.1 to 2 s, for as long as the process whose number is given lives."""

import random
import sys
import time
from pathlib import Path

rng = random.Random()
while Path(f"/proc/{sys.argv[1]}").exists():
    until = time.monotonic() + rng.uniform(0.1, 2.0)
    while time.monotonic() < until:
        pass
    time.sleep(rng.uniform(0.1, 2.0))
