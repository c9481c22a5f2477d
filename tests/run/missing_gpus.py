"""Start runs on Ray clusters that lack the GPUs they declare, each in a process of its own.

declared   Ray is told of two GPUs, but there are none: torch sees nothing
busy       two GPUs are declared, and something else holds one of them
few        the run asks for more GPUs than the cluster has
"""

import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from offbeat.config import Config, parse
from offbeat.errors import OffbeatError
from offbeat.placement.hardware import Hardware
from offbeat.run.directory import RunDirectory
from offbeat.run.ray.entry import environment
from offbeat.run.sinks import open_journal
from tests import ROOT
from tests.fixtures.tiny_model import save_model

LIMIT = 30.0
WORDS = {
    "declared": ("Ray has 2 GPUs", "torch sees none"),
    "busy": ("waited 25 s for the GPUs of this run: 2", "1 are free"),
    "few": ("workers.count = 4 need 5 GPUs, but there are 2", "nearest that fits"),
}
"""What the message of each case must say."""


def attempt(case: str, place: Path) -> tuple[float, str]:
    """Start a run on a cluster with two declared GPUs; return the seconds until it ended, and its message."""
    save_model(place / "model")
    config = parse(
        {
            "model": {"path": str(place / "model")},
            "engine": {"kind": "hf"},
            "run": {"place": "ray"},
            "workers": {"count": 4 if case == "few" else 1},
        }
    )
    directory = RunDirectory(place / "run")
    directory.create(config)
    with environment(config, directory):
        import ray

        from offbeat.run.ray import attempt as module

        ray.init(address="local", num_cpus=4, num_gpus=2, include_dashboard=False, log_to_driver=False)
        seen = patch.object(module, "cluster_hardware", lambda: Hardware(1, 2, 80))
        try:
            if case == "declared":
                return _run(config, directory, module)
            taken: Any = ray.remote(num_gpus=1 if case == "busy" else 0)(_Holder).remote()
            ray.get(taken.ready.remote(), timeout=60)
            with seen:
                return _run(config, directory, module)
        finally:
            ray.shutdown()


class _Holder:
    """Holds a GPU."""

    def ready(self) -> bool:
        return True


def _run(config: Config, directory: RunDirectory, module: Any) -> tuple[float, str]:
    with open_journal(directory, (), None) as journal:
        started = time.monotonic()
        try:
            asyncio.run(module.RunAttempt(config, directory, journal).run(None))
        except OffbeatError as error:
            return time.monotonic() - started, str(error)
    raise AssertionError("the run started without its GPUs")


def in_own_process(case: str) -> tuple[float, str]:
    """Run a case in a process of its own, because Ray reads its settings once, at import."""
    command = [sys.executable, "-m", "tests.run.missing_gpus", case]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    seconds, _, message = done.stdout.strip().splitlines()[-1].partition(" ")
    return float(seconds), message


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        seconds, message = attempt(sys.argv[1], Path(folder))
    print(f"{seconds:.1f} {message}")
