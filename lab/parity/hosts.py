"""Trainers of others for the checks of `offbeat.inside`: installed into directories of their own, without their pins.

verl and Trinity-RFT pin transformers and torch below ours, so they cannot live in our environment. Their losses,
registries and data need little: a directory with the package and what it imports, on PYTHONPATH in front of ours.
`python -m lab.bench.install hosts` resolves them beside us as a user would.

    python -m lab.parity.hosts    count the lines of each host's module: rows inside.7.*
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from lab.figures import ROOT, Figure, command_parser, record

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


GOALS: Final = {"shared": 250, "trl": 130, "trl_async": 130, "verl": 130, "verl_trainer": 130, "trinity": 130}
"""Lines that each part was meant to have, docstrings included."""
WHY: Final = {
    "shared": "rows, the run directory, refusals and a loss: five hosts and modules use them",
    "trl": "three ways to generate with lagged weights, replay, resume, several processes, figures by lag, refusals",
    "verl": "losses, estimators, and every refusal before training",
    "verl_trainer": "reading verl's queue, figures by lag and the registration",
    "trinity": "a loss, an advantage and an operator, each a class with the methods that Trinity-RFT asks for",
}


def main() -> bool:
    command_parser("Count the lines of each host's module: rows inside.7.*.").parse_args()
    inside = ROOT / "src" / "offbeat" / "inside"
    lines = {file.stem: len(file.read_text(encoding="utf-8").splitlines()) for file in inside.glob("*.py")}
    shared = [name for name in lines if name not in GOALS]
    lines["shared"] = sum(lines.pop(name) for name in shared)
    return record(
        *(
            Figure(
                f"inside.7.{name}", what, f"<= {goal}", lines[name], "lines", lines[name] <= goal, 1, WHY.get(name, "")
            )
            for name, goal in GOALS.items()
            for what in [f"lines of src/offbeat/inside: {', '.join(sorted(shared)) if name == 'shared' else name}"]
        )
    )


if __name__ == "__main__":
    main()
