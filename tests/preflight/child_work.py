"""Work for the child processes of the GPU doctor's tests; quick to import."""

import subprocess
import time
from collections.abc import Iterator

from offbeat.types import Json


def counting_down(start: int) -> Iterator[dict[str, Json]]:
    for number in range(start, -1, -1):
        yield {"number": number, "inverse": 1 / number}


def waiting() -> Iterator[dict[str, Json]]:
    subprocess.Popen(["sleep", "60"])
    print("still here", flush=True)
    yield {"ready": True}
    time.sleep(60)
