"""Checks of vLLM: two loads with their probes and version spans; sleep and wake; nothing left when the owner is killed.

One engine serves three checks. Its owner is a process of its own, which loads, probes, puts the engine to sleep and
wakes it, and is killed at the end. vLLM's sleep mode needs a GPU: on CPU the transformers engine takes its turns in the
same state machine.
"""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from offbeat.errors import DeadlinePassed, OffbeatError
from offbeat.imports import install_command, missing_modules
from offbeat.preflight.gpu.child import ChildFailed, DoctorChild, descendants, is_running
from offbeat.preflight.gpu.engine_trial import CACHE_BYTES, load_and_compare, take_turns
from offbeat.preflight.gpu.finding import ATTACH, GpuFinding, broken, passed, skipped
from offbeat.preflight.gpu.models import doctor_llama, save_model
from offbeat.rollout.engine import Engine
from offbeat.rollout.hf import HfEngine
from offbeat.rollout.vllm_owner import start_time
from offbeat.run.turns import SharedGpu
from offbeat.types import Json

TIED, UNTIED, SLEEP, DEATH = "engine tied", "engine untied", "sleep and wake", "owner death"
SHARE: Final = 0.3
"""Share of a GPU that must be free for the engine of a check."""
START: Final = 480.0
"""Seconds until the engine has started, loaded and answered. Compiling and CUDA graphs take minutes at first."""
PATIENCE: Final = 120.0
"""Seconds that a turn on the GPU waits for the calls of the other side."""
GONE_WITHIN: Final = 20.0
"""Seconds that vLLM's processes have to end after their owner."""
KEPT_BYTES: Final = 512 << 20
"""GPU memory that may differ before and after: other processes and allocators."""
WORKER_PART: Final = "offbeat.rollout.vllm_worker.WorkerPart"
OWN: Final = "offbeat.preflight.gpu.engines:own_engine"
_WRONG_FIX: Final = (
    f'install the versions of {install_command("vllm")}, or set engine.kind = "hf" meanwhile; else {ATTACH}'
)
_ENGINE_FIX: Final = f'free the GPU (nvidia-smi shows who uses it), or set engine.kind = "hf" meanwhile; else {ATTACH}'
_NO_VLLM: Final = f"vllm is not installed: {install_command('vllm')}"


def check_engine(device: str, *, _own: str = OWN, _extension: str = WORKER_PART) -> Iterator[GpuFinding]:
    """Check a tied model on one device, sleep and wake, and the death of the owner."""
    if missing_modules(["vllm"]):
        yield from (skipped(what, _NO_VLLM) for what in (TIED, SLEEP, DEATH))
        return
    free = _free_bytes(device)
    with (
        tempfile.TemporaryDirectory(prefix="offbeat-doctor-") as folder,  # not the owner's: a killed process leaves it
        DoctorChild(_own, device=device, folder=folder, extension=_extension) as owner,
    ):
        reported = []
        try:
            while (message := owner.receive(START)) and "ready" not in message:
                reported.append(message["what"])
                yield GpuFinding.from_json(message)
        except (ChildFailed, DeadlinePassed) as error:
            what = next(name for name in (TIED, SLEEP, DEATH) if name not in reported)
            yield replace(broken(what, str(error), _ENGINE_FIX), log=owner.log())
            return
        yield _orphans(owner, device, free)


def own_engine(device: str, folder: str, extension: str = WORKER_PART) -> Iterator[dict[str, Json]]:
    """Be the owner of an engine: yield the findings of load and sleep, then wait to be killed."""
    torch.set_num_threads(1)
    directory = Path(folder)
    save_model(directory, doctor_llama(tied=True))

    async def start() -> Engine:
        return await _start_vllm(directory, device, extension=extension, sleeps=device == "cuda")

    async def start_hf() -> Engine:
        return HfEngine.start(directory)

    with asyncio.Runner() as runner:
        gpu = SharedGpu(lambda turn: None, PATIENCE)
        engine = runner.run(gpu.start(start))
        loaded = runner.run(load_and_compare(engine, tied=True))
        yield finding_of(TIED, loaded, "one device, CUDA graphs" if device == "cuda" else "one process").to_json()
        sleeper = engine
        if device == "cpu":
            gpu = SharedGpu(lambda turn: None, PATIENCE)
            sleeper = runner.run(gpu.start(start_hf))
        yield sleep_finding(runner.run(take_turns(gpu, sleeper, device)), device).to_json()
        yield {"ready": True}
        runner.run(asyncio.sleep(600))


def check_split_engine(device: str, *, _extension: str = WORKER_PART) -> Iterator[GpuFinding]:
    """Check an untied model, split over two devices if there are two; on CPU over two processes."""
    if missing_modules(["vllm"]):
        yield skipped(UNTIED, _NO_VLLM)
        return
    split = 2 if device == "cpu" or torch.cuda.device_count() >= 2 else 1
    torch.set_num_threads(1)

    async def trial(directory: Path) -> dict[str, Any]:
        engine = await _start_vllm(directory, device, extension=_extension, split=split)
        try:
            return await load_and_compare(engine, tied=False)
        finally:
            await engine.close()

    with tempfile.TemporaryDirectory(prefix="offbeat-doctor-") as folder:
        save_model(Path(folder), doctor_llama(tied=False))
        try:
            found = asyncio.run(trial(Path(folder)))
        except OffbeatError as error:
            yield broken(UNTIED, f"tensor_parallel = {split}: {error}", _ENGINE_FIX)
            return
    parts = "tensor_parallel = 2" if split == 2 else "tensor_parallel = 1, because there is one GPU"
    yield finding_of(UNTIED, found, parts)


async def _start_vllm(directory: Path, device: str, *, extension: str, split: int = 1, sleeps: bool = False) -> Engine:
    from offbeat.rollout.vllm import VllmEngine

    return await VllmEngine.start(
        directory,
        dtype="bfloat16" if device == "cuda" else "float32",
        max_model_len=64,
        max_num_seqs=8,
        gpu_memory_utilization=SHARE,
        extra={"kv_cache_memory_bytes": CACHE_BYTES} if device == "cuda" else {},
        tensor_parallel=split,
        devices=tuple(range(split)) if device == "cuda" else None,
        sleeps=sleeps,
        _extension=extension,
    )


def finding_of(what: str, found: dict[str, Any], how: str) -> GpuFinding:
    """Judge what `load_and_compare` measured."""
    if found["problems"]:
        return broken(what, f"{how}: {'; '.join(found['problems'])}", _WRONG_FIX, **found["numbers"])
    numbers = found["numbers"]
    detail = (
        f"{how}: serves both versions that it loaded, |Δlogp| {numbers['probe gap']:.1g} in probes (tolerance "
        f"{numbers['probe tolerance']:.1g}) and {numbers['sampled gap']:.1g} in samples; version spans exact"
    )
    return passed(what, detail, **numbers)


def sleep_finding(found: dict[str, Any], device: str) -> GpuFinding:
    """Judge what `take_turns` measured."""
    numbers = dict(found["numbers"])
    on_cpu = "vLLM cannot sleep on CPU, so the transformers engine did" if device == "cpu" else ""
    if found["problems"]:
        fix = f"give trainer and engine different GPUs; else {ATTACH}"
        return broken(SLEEP, "; ".join([*found["problems"], *filter(None, [on_cpu])]), fix, **numbers)
    freed = on_cpu or f"{numbers['freed GB']:.1f} GB of GPU memory free while it slept"
    return passed(SLEEP, f"the same answers after it woke; {freed}", **numbers)


def _orphans(owner: DoctorChild, device: str, free: int) -> GpuFinding:
    """Kill the owner; look for its processes and its memory."""
    family = {pid: start_time(pid) for pid in descendants(owner.pid) if is_running(pid)}
    owner.kill_alone()
    began = time.monotonic()
    while (left := _left(family)) and time.monotonic() - began < GONE_WITHIN:
        time.sleep(0.2)
    seconds = time.monotonic() - began
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    numbers: dict[str, Json] = {"processes": len(family), "left": len(left), "seconds": round(seconds, 1)}
    if left:
        detail = f"{len(left)} of {len(family)} processes of vLLM live {GONE_WITHIN:.0f} s after their owner was killed"
        return broken(DEATH, detail, f"kill them before the next run: nvidia-smi lists them; else {ATTACH}", **numbers)
    kept = free - _free_bytes(device)
    if kept > KEPT_BYTES:
        detail = f"{kept / 1e9:.1f} GB of GPU memory did not come back after the owner was killed"
        return broken(DEATH, detail, "nvidia-smi shows who holds it; restart the container or the machine", **numbers)
    return passed(DEATH, f"all {len(family)} processes of vLLM ended {seconds:.1f} s after kill -9", **numbers)


def _left(family: dict[int, int]) -> list[int]:
    found = []
    for pid, started in family.items():
        with suppress(OSError):  # it ended between the two questions
            if is_running(pid) and start_time(pid) == started:
                found.append(pid)
    return found


def _free_bytes(device: str) -> int:
    return torch.cuda.mem_get_info(0)[0] if device == "cuda" else 0
