"""Groups convert to rows and back, and other tools can read the rows."""

from dataclasses import replace
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import LogReadError
from offbeat.experience.lance_table import Table
from offbeat.experience.log import ExperienceLog
from offbeat.experience.schema import GROUPS, digest, group_rows, groups_from
from offbeat.types import Group, Score
from tests.fixtures.groups import groups, make_group


@given(st.lists(groups(), min_size=1, max_size=5))
@settings(deadline=None)
def test_groups_are_unchanged_after_conversion_to_rows_and_back(given_groups: list[Group]) -> None:
    rows = group_rows(given_groups, [digest(g) for g in given_groups], appended_at=1.0, writer="test")
    assert rows.schema == GROUPS
    back = groups_from(rows)
    assert back == given_groups
    assert [digest(g) for g in back] == rows["digest"].to_pylist()


@given(groups(), groups())
@settings(deadline=None)
def test_equal_digests_mean_equal_groups(one: Group, other: Group) -> None:
    assert (digest(one) == digest(other)) == (one == other)


@pytest.mark.parametrize("field", ["token_ids", "behavior_logprobs", "loss_mask"])
def test_one_changed_token_changes_the_digest(field: str) -> None:
    group = make_group(1)
    values = getattr(group.completions[3], field).copy()
    values[5] = 0 if field != "loss_mask" else False
    changed = replace(group.completions[3], **{field: values})
    assert digest(replace(group, completions=(*group.completions[:3], changed, *group.completions[4:]))) != digest(
        group
    )


def test_arrays_from_rows_are_read_only() -> None:
    group = groups_from(group_rows([make_group(1)], ["d"], appended_at=0.0, writer="w"))[0]
    with pytest.raises(ValueError, match="read-only"):
        group.completions[0].token_ids[0] = 1


def test_the_summary_counts_scores_and_tokens() -> None:
    first, second, *rest = make_group(1).completions
    part = (replace(first, score=Score(1.0)), replace(second, score=Score(0.0)), replace(rest[0], score=None))
    row = group_rows([replace(make_group(1), completions=part)], ["d"], appended_at=0.0, writer="w").to_pylist()[0]
    assert (row["scored"], row["awaited"], row["reward_mean"], row["reward_std"]) == (2, 1, 0.5, 0.5)
    assert row["tokens"] == 16 + 3 * 16


def test_duckdb_and_pandas_read_the_log_without_offbeat(tmp_path: Path) -> None:
    with ExperienceLog.open(tmp_path) as log:
        log.append([make_group(i, size=4) for i in range(5)])
    import lance

    stored = lance.dataset(str(tmp_path / "groups.lance"))
    rows = duckdb.sql(
        "SELECT group_id, unnest(completion_ids) AS completion, unnest(rewards) AS reward FROM stored ORDER BY ALL"
    ).fetchall()
    expected = [(g.id, c.id, c.score.reward) for g in map(_small, range(5)) for c in g.completions]  # type: ignore[union-attr]
    assert rows == sorted(expected)
    frame = stored.to_table(columns=["group_id", "completion_ids", "rewards"]).to_pandas()
    assert isinstance(frame, pd.DataFrame)
    exploded = frame.explode(["completion_ids", "rewards"])
    assert len(exploded) == 20
    assert np.isclose(exploded["rewards"].astype(float).mean(), np.mean([r for _, _, r in rows]))


def _small(number: int) -> Group:
    return make_group(number, size=4)


def test_a_log_with_other_columns_is_refused(tmp_path: Path) -> None:
    Table(f"{tmp_path}/groups.lance", pa.schema([pa.field("name", pa.string())]))
    with pytest.raises(LogReadError, match="does not have the columns"):
        ExperienceLog.open(tmp_path)
