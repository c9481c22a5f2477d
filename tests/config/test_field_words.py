"""The words of field_words.txt, from other tools and from habit, lead to the settings that are meant."""

from pathlib import Path
from typing import Any

from offbeat.config import examine

LINES = (Path(__file__).parent / "field_words.txt").read_text(encoding="utf-8").splitlines()


def nested(typed: str) -> dict[str, Any]:
    data: Any = 1
    for part in reversed(typed.split(".")):
        data = {part: data}
    found: dict[str, Any] = data
    return found


def test_at_least_95_of_100_words_of_the_field_lead_to_the_right_setting() -> None:
    words = dict(line.split(" = ") for line in LINES if " = " in line and not line.startswith("#"))
    right = [
        typed
        for typed, meant in words.items()
        if any(f"did you mean {meant!r}" in problem for problem in examine(nested(typed)).problems)
    ]
    assert len(words) == 100 and len(right) >= 95, words.keys() - set(right)
