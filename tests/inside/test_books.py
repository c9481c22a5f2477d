"""Rows of a host become groups and come back, past groups are drawn as our sampler draws, and a resume rewinds."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import NotServable
from offbeat.experience.reader import LogReader
from offbeat.inside.books import Books
from offbeat.inside.losses import host_loss
from offbeat.inside.objectives import objective_for, refusal, servable
from offbeat.inside.rows import HostRow, groups_of, joined, plain, rows_of, scores_of
from offbeat.objective.presets import PRESETS
from offbeat.objective.spec import Advantage, Objective
from offbeat.types import UNKNOWN, Finish, Score, Unscorable

SIZE = 2


def some_rows(version: int | None, rewards: list[float], logprobs: bool = True) -> list[HostRow]:
    return [
        HostRow([1, 2, 3], [5 + i, 6, 7], [-0.5, -0.25, -1.0] if logprobs else None, reward, version)
        for i, reward in enumerate(rewards)
    ]


def test_a_row_keeps_tokens_logprobs_version_reward_and_ids(tmp_path: Path) -> None:
    row = HostRow(
        [1, 2], [7, 8, 9], [-0.1, 1e-8, -2.0], 0.75, 3, True, [True, False, True], {"exact": 1.0, "length": -0.25},
        {"answer": "4", "host": {"host": "trl", "step": 9}},
    )  # fmt: skip
    unscored = HostRow([1, 2], [7], [float("nan")], float("nan"), None)
    books = Books(tmp_path, host="trl")
    books.write([row, unscored], size=SIZE, k=9)
    books.close()
    [group] = LogReader.open(tmp_path / "experience").groups()
    one, other = group.completions
    assert one.token_ids.tolist() == [7, 8, 9] and one.loss_mask.tolist() == [True, False, True]
    assert np.allclose(one.behavior_logprobs, [-0.1, 0, -2.0])  # rounding of an engine may end above 0
    assert one.oldest_version == 3 and one.versions[0].run == books.run and one.finish is Finish.LENGTH
    assert one.score == Score(0.75, {"exact": 1.0, "length": -0.25})
    assert other.behavior_logprobs is UNKNOWN and other.versions == () and isinstance(other.score, Unscorable)
    assert group.prompt.columns == row.columns and group.prompt.task == "trl"


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 5), min_size=4, max_size=4),
    rewards=st.lists(st.floats(-3, 3, width=32), min_size=4, max_size=4),
    versions=st.lists(st.integers(0, 9), min_size=2, max_size=2),
)
def test_groups_become_the_rows_they_were(lengths: list[int], rewards: list[float], versions: list[int]) -> None:
    rows = [
        HostRow([1] * (1 + i // 2), list(range(2, 2 + n)), [-0.5 * (t + 1) for t in range(n)], r, versions[i // 2])
        for i, (n, r) in enumerate(zip(lengths, rewards, strict=True))
    ]
    groups = groups_of(rows, SIZE, prefix="g", task="t")
    tensors = rows_of(groups, SIZE, k=9, fill=0)
    for row, one in enumerate(rows):
        n = len(one.token_ids)
        assert tensors["completion_ids"][row, :n].tolist() == one.token_ids
        assert tensors["prompt_ids"][row][tensors["prompt_mask"][row].bool()].tolist() == one.prompt_ids
        assert tensors["mask"][row].sum() == n
        assert tensors["behavior"][row, :n].tolist() == one.logprobs
        assert tensors["lags"][row, :n].tolist() == [9 - (one.version or 0)] * n
    rewards_BG, scored_BG = scores_of(groups, 3)
    assert rewards_BG[:, :2].flatten().tolist() == rewards and not scored_BG[:, 2].any()


def test_past_groups_are_drawn_at_most_as_often_as_the_budget_says(tmp_path: Path) -> None:
    books = Books(tmp_path, host="trl", reuse_budget=3)
    books.write(some_rows(0, [1.0, 0.0]) + some_rows(0, [1.0, 1.0]), size=SIZE, k=0)  # the second has no contrast
    drawn = [len(books.draw(2, k=k, largest=SIZE)) for k in range(1, 6)]
    assert drawn == [1, 1, 0, 0, 0]  # its first use was when it was written
    books.close()


def test_draws_leave_out_what_cannot_be_used(tmp_path: Path) -> None:
    books = Books(tmp_path, host="trl", max_lag=4)
    books.write(some_rows(0, [1.0, 0.0, 0.0]), size=3, k=0)  # too large
    books.write(some_rows(None, [1.0, 0.0], logprobs=False), size=SIZE, k=0)
    books.write(some_rows(2, [1.0, 0.0]), size=SIZE, k=2)
    assert [one.oldest_version for one in books.draw(9, k=3, largest=SIZE, known=True)] == [2]
    assert books.draw(9, k=7, largest=SIZE, known=True) == []  # its lag is 5
    books.write(some_rows(7, [1.0, 0.0]) * 3, size=SIZE, k=7)
    assert len(books.draw(9, k=8, largest=SIZE, known=True, multiple=2)) == 2  # three could be drawn
    books.close()


def test_a_resume_cancels_later_steps_and_supersedes_versions_that_are_gone(tmp_path: Path) -> None:
    books, states = Books(tmp_path, host="trl"), []
    for k, version in ((0, 0), (1, 0), (2, 2), (3, 2), (4, 4)):
        [group] = books.write(some_rows(version, [1.0, 0.0]), size=SIZE, k=k)
        books.trained([group], None, {"reward_mean": 0.5}, step=k + 1)
        states.append(books.state())
    books.close()  # stopped after a checkpoint of step 2
    again = Books(tmp_path, host="trl", state=states[1], step=2)
    assert again.run == books.run
    assert str(again.log.ledger()) == "5 generated = 2 trained + 2 waiting + 1 dropped (1 superseded) + 0 in flight"
    drawn = again.draw(9, k=3, largest=SIZE)
    assert sorted(one.oldest_version or 0 for one in drawn) == [0, 0, 2, 2]
    again.close()


def test_two_runs_share_a_log_and_see_each_other_as_data_without_versions(tmp_path: Path) -> None:
    shared = tmp_path / "experience"
    one = Books(tmp_path / "one", host="trl", experience=shared)
    other = Books(tmp_path / "other", host="verl", experience=shared)
    one.write(some_rows(3, [1.0, 0.0]), size=SIZE, k=3)
    other.write(some_rows(5, [1.0, 0.0]), size=SIZE, k=5)
    assert {group.oldest_version for group in other.draw(9, k=6, largest=SIZE)} == {None, 5}
    one.close()
    other.close()


def test_what_a_hook_cannot_serve_is_refused_with_the_reason() -> None:
    for name, preset in PRESETS.items():
        for host, streams in (("TRL", 2), ("verl", 1)):
            reason = refusal(preset.objective, host=host, streams=streams)
            assert (name in servable(host, streams=streams)) == (reason == "")
            if reason:
                with pytest.raises(NotServable, match=f"'{name}' cannot run inside {host}: "):
                    objective_for(name, host=host, streams=streams)
    with pytest.raises(NotServable, match="'gpro' is not a preset"):
        objective_for("gpro", host="TRL")
    with pytest.raises(NotServable, match="earlier results of each prompt"):
        objective_for(Objective(Advantage.SHRUNK), host="TRL")


def test_a_loss_with_several_advantages_a_completion_is_refused() -> None:
    mask_NT, policy_NT = torch.ones(2, 3, dtype=torch.bool), torch.full((2, 3), -1.0)
    with pytest.raises(NotServable, match="differ from token to token"):
        host_loss(PRESETS["grpo"].objective, policy_NT, policy_NT, torch.rand(2, 3), mask_NT)


def test_rows_of_different_widths_are_joined_and_columns_stay_plain() -> None:
    first, second = torch.ones(1, 2, dtype=torch.int64), torch.ones(2, 3)
    assert joined(first, second, fill=9).tolist() == [[1, 1, 9], [1, 1, 1], [1, 1, 1]]
    assert plain({"prompt": "x", "n": 1, "s": {1, 2}, "nan": [1.5]}) == {"n": 1, "nan": [1.5]}
