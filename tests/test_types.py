"""Data classes are frozen, compared by value, and explicit about unknown values."""

from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from offbeat.types import UNKNOWN, Completion, Group, Prompt, Score, Unscorable, VersionSpan


def completion(**changes: object) -> Completion:
    base = Completion("g/0", np.array([4, 2]), np.array([-0.1, -0.3]), (VersionSpan(3, 0, 2),), score=Score(1.0))
    return replace(base, **changes)  # type: ignore[arg-type]


def test_arrays_can_be_changed_neither_through_the_object_nor_from_outside() -> None:
    ids = np.array([4, 2], np.int32)
    made = completion(token_ids=ids)
    ids[0] = 9
    assert made.token_ids.tolist() == [4, 2]
    with pytest.raises(ValueError, match="read-only"):
        made.token_ids[0] = 9
    with pytest.raises(FrozenInstanceError):
        made.id = "x"  # type: ignore[misc]


def test_a_read_only_array_is_kept_without_a_copy() -> None:
    ids = np.array([4, 2], np.int32)
    ids.flags.writeable = False
    assert completion(token_ids=ids).token_ids is ids


def test_equality_is_by_value() -> None:
    assert completion() == completion()
    assert completion() != completion(token_ids=np.array([4, 3]))
    assert completion() != completion(behavior_logprobs=UNKNOWN)
    assert completion(behavior_logprobs=[np.nan, 0.0]) == completion(behavior_logprobs=[np.nan, 0.0])
    assert completion() != completion(score=Unscorable("timeout"))


def test_tokens_are_trained_on_unless_a_mask_says_otherwise() -> None:
    assert completion().loss_mask.tolist() == [True, True]
    assert completion(loss_mask=[True, False]).loss_mask.tolist() == [True, False]


def test_lag_counts_from_the_oldest_version_that_took_part() -> None:
    person = completion(id="g/1", versions=(), behavior_logprobs=UNKNOWN, source="human", score=None)
    young = completion(id="g/2", versions=(VersionSpan(7, 0, 2),))
    prompt = Prompt("p", np.array([1]), "arithmetic")
    assert Group("g", prompt, (person, young)).oldest_version == 7
    assert Group("g", prompt, (person, young, completion())).oldest_version == 3
    assert Group("g", prompt, (person,)).oldest_version is None
    assert not Group("g", prompt, (person, young)).scored
    assert Group("g", prompt, (young, completion(score=Unscorable("crash")))).scored


def test_a_group_is_shown_in_at_most_ten_lines_with_text_or_token_ids() -> None:
    answers = [Completion(f"g/{i}", [4] * 30, UNKNOWN, score=Score(i / 2), text="4" * i) for i in range(9)]
    group = Group("g", Prompt("p", [1, 2], "sums", text="2+2="), tuple(answers))
    lines = str(group).splitlines()
    assert len(lines) == 10 and lines[1] == "prompt p: '2+2='" and lines[-1].strip() == "… and 2 more"
    assert lines[2] == "       0  tokens 4 4 4 4 4 4 4 4 4 4 4 4 4 4 4 4 …  30 tokens, stop"
    assert lines[3] == "     0.5  '4'  30 tokens, stop"
    assert all(len(line) < 120 for line in lines)


def test_text_is_no_part_of_what_a_group_is() -> None:
    prompt = Prompt("p", [1, 2], "sums")
    assert prompt == replace(prompt, text="2+2=")
