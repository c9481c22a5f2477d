"""A log in which an earlier release wrote numbers out of bounds: read, shown, and rescued by a right score."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from offbeat.cli.main import app
from offbeat.experience.feedback import Deadline, LateScore
from offbeat.experience.log import ExperienceLog
from offbeat.experience.reader import LogReader
from offbeat.experience.schema import SCORES, digest, group_rows
from offbeat.objective.spec import Objective
from offbeat.trainer.batch import find_faults
from offbeat.types import Completion, Group, Prompt, Score, VersionSpan

run = CliRunner(env={"COLUMNS": "200"}).invoke


def group(name: str, *rewards: float | None, logprob: float = -0.5) -> Group:
    span = (VersionSpan(0, 0, 2),)
    scores = [None if reward is None else Score(reward) for reward in rewards]
    answers = (Completion(f"{name}/{i}", [4, 2], [logprob, -0.1], span, score=one) for i, one in enumerate(scores))
    return Group(name, Prompt(name, [1, 2], "sums"), tuple(answers))


def write_unchecked(log: ExperienceLog, *groups: Group) -> None:
    rows = group_rows(groups, [digest(one) for one in groups], appended_at=1.0, writer="earlier")
    log.tables.groups.append(rows)


def late(log: ExperienceLog, completion_id: str, reward: float) -> None:
    row = {"group_id": [completion_id.split("/")[0]], "completion_id": [completion_id], "reward": [reward]}
    row |= {"unscorable": [None], "detail": [None], "breakdown": [None], "scored_at": [1.0], "scorer": [""]}
    log.tables.scores.append(pa.table(row, schema=SCORES))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    with ExperienceLog.open(tmp_path / "log") as log:
        log.append([group("g0", 1.0, None), group("g1", 1.0, 0.0)])
        late(log, "g0/1", -1e200)
        write_unchecked(log, group("g2", 1e150, 0.0), group("g3", 1.0, 0.0, logprob=1e30))
    return tmp_path / "log"


def test_every_statistic_of_the_log_is_finite_and_bad_groups_are_not_drawn(place: Path) -> None:
    reader = LogReader.open(place)
    rows, _ = reader.index_since(None)
    assert rows.ripe.tolist() == [False, True, False, True]
    assert np.isfinite([rows.reward_mean, rows.reward_std]).all()
    ledger = reader.ledger()
    ledger.check()
    assert str(ledger) == "4 generated = 0 trained + 2 waiting + 2 dropped (2 quarantined) + 0 in flight"
    assert "completion g2/0 has reward 1e+150" in ledger.fates["g2"].cause
    assert reader.damaged() == [], "they are what was written"
    assert [one.completion.id for one in reader.pending()] == ["g0/1", "g2/0"]


def test_a_right_score_rescues_a_group_and_so_does_a_deadline(place: Path) -> None:
    with ExperienceLog.open(place) as log:
        _, cursor = log.index_since(None)
        assert log.feedback([{"completion_id": "g0/1", "score": 0.0}]).new == 1
        rows, _ = log.index_since(cursor)
        assert rows.ordinal.tolist() == [0] and rows.ripe.all() and rows.reward_mean.tolist() == [0.5]
        assert log.give_up(Deadline(0.0), now=9e9) == ["g2"]
        assert log.ledger().dropped == {} and log.index_since(None)[0].ripe.all()


def test_a_score_out_of_bounds_does_not_replace_a_good_one(place: Path) -> None:
    with ExperienceLog.open(place) as log:
        tally = log.feedback([{"completion_id": "g1/0", "score": -1e200}], replace=True)
        assert "row 1: completion g1/0 has reward -1e+200" in tally.examples[next(iter(tally.refused))][0]
        assert len(log.score([LateScore("g1", "g1/0", Score(1 << 20_000))]).refused) == 1, "no text has so many digits"
        assert log.index_since(None)[0].ripe.tolist() == [False, True, False, True]


def test_the_trainer_refuses_a_group_with_log_probs_out_of_bounds(place: Path) -> None:
    [bad, good] = LogReader.open(place).read(["g3", "g1"])
    faults = find_faults([bad, good], Objective(), token_budget=64, vocab_size=10)
    assert faults.keys() == {"g3"} and "behavior log-probs are not finite" in faults["g3"]


@pytest.mark.parametrize("command", [("log", "stats"), ("log", "fates"), ("log", "pending"), ("log", "show")])
def test_commands_read_such_a_log(place: Path, command: tuple[str, ...]) -> None:
    result = run(app, [*command, str(place)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception


def test_an_export_has_no_number_out_of_bounds_among_its_rewards(place: Path, tmp_path: Path) -> None:
    result = run(app, ["log", "export", str(place), str(tmp_path / "out.jsonl")])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(rows) == 8 and "1e+200" not in json.dumps(rows) and "1e+150" not in json.dumps(rows)
