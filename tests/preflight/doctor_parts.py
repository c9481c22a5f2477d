"""Parts for the processes of the GPU doctor's tests; quick to import."""

import os
import subprocess
import time
from pathlib import Path

from offbeat.preflight.doctor import Finding, FindingState


def fine(device: str) -> Finding:
    print("all is well")
    return Finding("fine", FindingState.OK, "fast", numbers={"speed": 2})


def crashing(device: str) -> Finding:
    print(f"{Path.home()}/secret", flush=True)
    os._exit(9)


def hanging(device: str) -> Finding:
    child = subprocess.Popen(["sleep", "60"])
    Path("child").write_text(str(child.pid))
    time.sleep(60)
    return fine(device)
