"""The words of lab/site/field_words.txt lead to their settings; the lab command asks `offbeat check` itself."""

from typing import Any

from lab.site.field_words import sections
from offbeat.config import examine


def nested(typed: str) -> dict[str, Any]:
    data: Any = 1
    for part in reversed(typed.split(".")):
        data = {part: data}
    found: dict[str, Any] = data
    return found


def test_at_least_95_of_100_words_of_the_field_lead_to_the_right_setting() -> None:
    words = {typed: meant for tool in sections().values() for typed, meant in tool.items()}
    right = [
        typed
        for typed, meant in words.items()
        if any(f"did you mean {meant!r}" in problem for problem in examine(nested(typed)).problems)
    ]
    assert len(words) == 100 and len(right) >= 95, words.keys() - set(right)
