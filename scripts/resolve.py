"""Resolve the install commands of README.md from the public package index alone, as a new user's pip would.

    python scripts/resolve.py                       what .ci/run does: minutes, nothing is installed
    python scripts/resolve.py --python python3.12   for another Python

pip gets no configuration file, no local wheels and no further index; only how to reach the network stays as this
machine has it. A recent pip reads the metadata of wheels, so gigabytes of CUDA are resolved and not downloaded.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parent.parent
NETWORK: Final = ("PIP_CERT", "PIP_CLIENT_CERT", "PIP_PROXY", "PIP_DEFAULT_TIMEOUT", "PIP_CACHE_DIR")
"""Settings of pip that say how it reaches the index, and not what it finds there."""
SHOWN: Final = ("torch", "triton", "vllm", "transformers")
HOSTS: Final = ("trl", "verl", "trinity-rft")
"""Trainers beside which the pages docs/how-to/inside-*.md install offbeat, each at its newest release."""


@dataclass(frozen=True)
class Resolved:
    """What pip would install, or its error."""

    command: str
    versions: dict[str, str]
    """By normalized name, without offbeat itself. Empty if it does not resolve."""
    seconds: float
    error: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    """Where pip would get each package."""

    def __str__(self) -> str:
        if self.error:
            return f"FAILS: {self.command}\n{self.error}"
        shown = ", ".join(f"{name} {self.versions[name]}" for name in SHOWN if name in self.versions)
        return f"{self.command}: {len(self.versions)} packages in {self.seconds:.0f} s; {shown}"


def readme_commands(text: str) -> list[str]:
    """Return the `pip install` commands of the Bash blocks of README.md, without their comments.

    >>> readme_commands("```bash\\npip install '.[train]'  # CPU\\noffbeat doctor\\n```\\npip install nothing\\n")
    ["pip install '.[train]'"]
    """
    lines = [line for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    return [line.partition("  #")[0].strip() for line in lines if line.startswith("pip install ")]


def normalized(name: str) -> str:
    """Return the name of a package as an index spells it (PEP 503).

    >>> normalized("Lance_Namespace")
    'lance-namespace'
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def public_index(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which pip knows the public index and nothing else.

    >>> public_index({"PIP_FIND_LINKS": "wheels", "PIP_CERT": "ca.pem"})["PIP_FIND_LINKS"]
    ''
    """
    kept = {name: value for name, value in environment.items() if not name.startswith("PIP_") or name in NETWORK}
    return kept | {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def make_pip(place: Path, python: str, environment: Mapping[str, str]) -> Path:
    """Make an environment in `place` with the newest pip, and return that pip. Older ones download whole wheels."""
    subprocess.run([python, "-m", "venv", place], env=environment, check=True)
    pip = place / "bin" / "pip"
    subprocess.run([pip, "install", "--quiet", "--upgrade", "pip"], env=environment, check=True)
    return pip


def resolve(pip: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> Resolved:
    """Ask pip what it would install for these arguments into an empty environment, in the root of the checkout."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.json"
        options = ["--dry-run", "--ignore-installed", "--quiet", "--report", str(report)]
        done = subprocess.run(
            [pip, "install", *options, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        installed = json.loads(report.read_text(encoding="utf-8"))["install"] if done.returncode == 0 else []
    found = {normalized(one["metadata"]["name"]): one["metadata"]["version"] for one in installed}
    files = {normalized(one["metadata"]["name"]): one["download_info"]["url"] for one in installed}
    found.pop("offbeat", None)
    error = "" if done.returncode == 0 else done.stderr.strip()[-2000:] or f"pip ended with {done.returncode}"
    return Resolved(shlex.join(["pip", "install", *arguments]), found, time.monotonic() - started, error, files)


def beside(host: str) -> str:
    """Return the command of the pages about other trainers, with the trainer itself.

    >>> beside("trl")
    "pip install '.[log]' trl"
    """
    return f"pip install '.[log]' {host}"


def resolve_readme(python: str) -> list[Resolved]:
    """Resolve the install commands of README.md and of other trainers at once; the time is that of the network."""
    commands = readme_commands((ROOT / "README.md").read_text(encoding="utf-8"))
    commands += [beside(host) for host in HOSTS]
    environment = public_index(os.environ)
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(max(1, len(commands))) as pool:
        pip = make_pip(Path(place), python, environment)
        return list(pool.map(lambda command: resolve(pip, shlex.split(command)[2:], environment), commands))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable)
    found = resolve_readme(parser.parse_args().python)
    print(*found, sep="\n")
    if any(one.error for one in found):
        sys.exit("an install command does not resolve; for README.md's, `python scripts/lock.py` locks versions again")
    found = found[: -len(HOSTS)]
    if len(found) - sum("vllm" in one.versions for one in found) in (0, len(found)):
        sys.exit("README.md needs two `pip install` lines in a Bash block: for a GPU, with vllm, and for a CPU")
