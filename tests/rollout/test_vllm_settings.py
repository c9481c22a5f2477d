"""Settings that vLLM would refuse, without starting it."""

import asyncio
from pathlib import Path

import pytest

from offbeat.config import parse
from offbeat.placement import hardware
from offbeat.rollout import vllm_settings
from offbeat.rollout.vllm import VllmEngine
from offbeat.run.engines import start_engine
from tests.fixtures.tiny_model import save_llama


@pytest.mark.parametrize(("completion", "longest"), [(100, 256), (255, 256)])
def test_prompt_and_completion_never_exceed_what_the_model_reads(
    completion: int, longest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_llama(tmp_path / "model", tied=True)
    asked: list[vllm_settings.VllmSettings] = []

    async def start(path: Path, settings: vllm_settings.VllmSettings) -> None:
        asked.append(settings)

    monkeypatch.setattr(VllmEngine, "start", start)
    given = {"model": {"path": str(tmp_path / "model")}, "sampling": {"max_tokens": completion}}
    asyncio.run(start_engine(parse(given)))
    assert asked[0].max_model_len == longest


@pytest.mark.parametrize(
    ("gpu", "instructions", "dtypes"),
    [
        (False, False, {"bfloat16": "float32", "float16": "float16", "float32": "float32"}),
        (False, True, {"bfloat16": "bfloat16"}),
        (True, False, {"bfloat16": "bfloat16"}),
    ],
)
def test_vllm_computes_in_float32_only_where_bfloat16_is_emulated(
    gpu: bool, instructions: bool, dtypes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_settings, "on_gpu", lambda: gpu)
    monkeypatch.setattr(hardware, "multiplies_bfloat16", lambda: instructions)
    assert {dtype: vllm_settings.computing_dtype(dtype) for dtype in dtypes} == dtypes
