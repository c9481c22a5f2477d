"""Where the tests of this folder compute: on a GPU if there is one, and with `-m engine` on the CPU."""

import pytest
import torch


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.engine)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    return str(request.param)
