"""Trainers of others for the checks of `offbeat.inside`: installed into directories of their own, without their pins.

verl and Trinity-RFT pin transformers and torch below ours, so they cannot live in our environment. Their losses,
registries and data need little: a directory with the package and what it imports, on PYTHONPATH in front of ours.
`python -m lab.bench.install hosts` resolves them beside us as a user would.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from lab.figures import ROOT

HOSTS: Final = {
    "verl": (
        "verl==0.9.1", "TransferQueue==0.1.11", "antlr4-python3-runtime==4.9.3", "cachetools==6.2.2",
        "codetiming==1.4.0", "hydra-core==1.3.2", "omegaconf==2.3.0", "torchdata==0.11.0", "pyzmq==27.1.0",
    ),
    "trinity": (
        "trinity-rft==0.6.0", "antlr4-python3-runtime==4.9.3", "omegaconf==2.3.0", "verl==0.9.1",
        "cachetools==6.2.2", "codetiming==1.4.0", "hydra-core==1.3.2", "torchdata==0.11.0",
    ),
}  # fmt: skip


def directory(host: str) -> Path:
    """Return the directory with a host's packages; install them if they are not there."""
    place = ROOT / "build" / "hosts" / HOSTS[host][0]
    if not (place / ".complete").exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(place), *HOSTS[host]]
        subprocess.run(command, check=True)
        (place / ".complete").touch()
    return place


def environment(host: str) -> dict[str, str]:
    """Return the environment variables of a process in which the host can be imported."""
    paths = [str(directory(host)), str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONWARNINGS": "ignore"}


def run(host: str, module: str, *arguments: str) -> subprocess.CompletedProcess[Any]:
    """Run a module of ours in a process in which the host can be imported."""
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment(host), capture_output=True, text=True)
