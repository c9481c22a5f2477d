"""Settings that a run from Python gets if they are left out."""

from pathlib import Path

import pytest

from offbeat.from_python import own_settings
from offbeat.run.directory import RunDirectory


def correct(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """Return 1 for a right answer."""
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ({"steps": 100}, 64),
        ({"steps": 5, "prompts_per_step": 4, "group_size": 4}, 10),
        ({"steps": 2, "prompts_per_step": 4, "group_size": 4}, 8),
        ({"steps": 5, "prompts_per_step": 4, "evaluation": {"prompts": 50}}, 50),
    ],
)
def test_evaluation_is_sized_to_the_run(given: dict[str, object], prompts: int, tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "answer": "2"}]
    found = own_settings(
        RunDirectory(tmp_path), tmp_path, correct, rows, eval_dataset=None, reward_range=(0, 1), settings=given
    )
    assert found["evaluation"]["prompts"] == prompts
