"""The example learns, and its lag follows the formula."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "minimal.py"


@pytest.fixture(scope="module")
def minimal() -> ModuleType:
    spec = importlib.util.spec_from_file_location("minimal", EXAMPLE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.REPORT_EVERY = 3  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("every", [1, 4])
def test_lag_follows_the_formula(minimal: ModuleType, every: int, capsys: pytest.CaptureFixture[str]) -> None:
    minimal.main(["--pretrain-steps", "20", "--steps", "12", "--sync-every", str(every)])
    reports = re.findall(r"step +(\d+)  version +(\d+)  lag +(\d+)", capsys.readouterr().out)
    assert len(reports) == 4
    for step, version, lag in (tuple(map(int, report)) for report in reports):
        assert lag == (step - 1) % every == step - 1 - version


@pytest.mark.engine
def test_a_shortened_run_with_a_lagged_server_learns(minimal: ModuleType) -> None:
    rates = minimal.main(["--pretrain-steps", "400", "--steps", "60", "--sync-every", "10"])
    assert rates[-1] > rates[0] + 0.1


def test_the_same_seed_gives_the_same_curve(minimal: ModuleType) -> None:
    short = ["--pretrain-steps", "20", "--steps", "4", "--sync-every", "2", "--updates-per-batch", "2"]
    assert minimal.main(short) == minimal.main(short)


def test_the_example_stays_on_one_page() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 250
