"""`offbeat feedback` and `offbeat log pending`, from the import of answers to complete groups."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from offbeat.cli.main import app
from offbeat.config import parse
from offbeat.experience.ledger import LedgerEvent, LedgerEventKind
from offbeat.experience.log import ExperienceLog
from offbeat.run.directory import RunDirectory
from offbeat.types import Score
from tests.fixtures.groups import make_group
from tests.fixtures.tiny_model import save_tokenizer


def run(*arguments: object, stdin: str = "") -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, [str(argument) for argument in arguments], input=stdin)


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A run directory whose log has two answers to each of two tickets, imported without scores."""
    directory = RunDirectory(tmp_path / "run")
    directory.create(parse({}))
    save_tokenizer(directory.tokenizer)
    rows = [
        {"ticket": t, "answer_id": f"{t}{i}", "prompt": f"{t} + {i} = ?", "answer": str(i)}
        for t, i in (("a", 0), ("b", 0), ("a", 1), ("b", 1))
    ]
    rows = [row | {"prompt": f"what is {row['ticket']}?"} for row in rows]
    options = ("--task", "support", "--source", "model:ours", "--tokenizer", directory.tokenizer)
    columns = ("--columns", "response=answer,group=ticket")
    imported = run("import", lines(tmp_path / "answers.jsonl", *rows), "--into", directory.path, *options, *columns)
    assert "imported     2 groups, 4 completions" in imported.output and "4 awaiting feedback" in imported.output
    assert f"offbeat log pending {directory.path}" in imported.output
    return directory.path


def rewards(place: Path) -> dict[str, float]:
    with ExperienceLog.open(place / "experience") as log:
        return {c.id: c.score.reward for g in log.groups() for c in g.completions if isinstance(c.score, Score)}


def test_scores_join_by_own_ids_with_exact_counts_twice(place: Path, tmp_path: Path) -> None:
    file = lines(
        tmp_path / "scores.jsonl",
        {"answer_id": "a0", "score": 1},
        {"answer_id": "a0", "score": 1},
        {"answer_id": "b1", "score": 0},
        "{half a line\n",
        {"answer_id": "zz", "score": 1},
        {"answer_id": "a0", "score": 0.5},
        {"answer_id": "a1", "score": None},
    )
    first = run("feedback", place, file, "--refused", tmp_path / "refused.jsonl")
    assert first.exit_code == 0, first.output
    assert first.output.startswith(
        "read      7 lines\nnew       2 scores\nknown     1 that the log has with the same score\n"
        "waiting   1 lines whose score is null\nrefused   3\n"
    )
    for expected in (
        "unreadable: 1\n    scores.jsonl, line 4: not JSON",
        "unknown-completion: 1\n    scores.jsonl, line 5: there is no completion 'zz'",
        "conflict: 1\n    scores.jsonl, line 6: completion 'a0' has the score 1.0, here it is 0.5",
    ):
        assert expected in first.output
    written = [json.loads(line) for line in (tmp_path / "refused.jsonl").read_text().splitlines()]
    assert sorted((entry["where"], entry["reason"]) for entry in written) == [
        ("scores.jsonl, line 4", "unreadable"),
        ("scores.jsonl, line 5", "unknown-completion"),
        ("scores.jsonl, line 6", "conflict"),
    ]
    again = run("feedback", place, file)
    assert "new       0 scores\nknown     3 that" in again.output and "refused   3" in again.output
    assert rewards(place) == {"a0": 1.0, "b1": 0.0}


def test_the_exit_code_says_whether_anything_fits(place: Path, tmp_path: Path) -> None:
    mixed = lines(tmp_path / "mixed.jsonl", {"id": "a0", "score": 1}, {"id": "zz", "score": 1})
    assert run("feedback", place, mixed).exit_code == 0
    assert run("feedback", place, mixed, "--strict").exit_code == 1
    assert run("feedback", place, lines(tmp_path / "none.jsonl", {"id": "zz", "score": 1})).exit_code == 1
    assert run("feedback", place, lines(tmp_path / "all.jsonl", {"id": "a1", "score": 1}), "--strict").exit_code == 0
    missing = run("feedback", place, tmp_path / "gone.jsonl")
    assert missing.exit_code == 1 and "there is no file" in missing.output
    nowhere = run("feedback", tmp_path / "nowhere", mixed)
    assert nowhere.exit_code == 1 and "there is no experience log" in nowhere.output


def test_options_name_columns_scorer_range_and_corrections(place: Path, tmp_path: Path) -> None:
    file = lines(tmp_path / "stars.jsonl", {"ticket_answer": "a0", "stars": 5}, {"ticket_answer": "a1", "stars": 0.5})
    options = ("--columns", "completion_id=ticket_answer,reward=stars", "--scorer", "ann", "--reward-range", "0,1")
    result = run("feedback", place, file, *options)
    assert "new       1 scores" in result.output and "line 1: completion a0 has reward 5.0" in result.output
    with ExperienceLog.open(place / "experience") as log:
        assert log.tables.scores.scan(0, 1, ["scorer"])["scorer"].to_pylist() == ["ann"]
    corrected = run("feedback", place, "-", "--replace", stdin='{"answer_id": "a1", "score": 0.25}\n')
    assert "replaced  1 scores" in corrected.output and rewards(place) == {"a1": 0.25}
    wrong = run("feedback", place, file, "--columns", "completion=ticket_answer")
    assert wrong.exit_code == 1 and "did you mean 'completion_id'?" in wrong.output


@pytest.mark.engine
def test_pending_goes_through_a_pipe_to_an_annotator_and_back(place: Path) -> None:
    offbeat = [sys.executable, "-c", "from offbeat.cli.main import main; main()"]
    listed = subprocess.run([*offbeat, "log", "pending", str(place), "--jsonl"], capture_output=True, text=True)
    rows = [json.loads(line) for line in listed.stdout.splitlines()]
    assert [row["completion_id"] for row in rows] == ["a0", "a1", "b0", "b1"], listed.stderr
    assert rows[0]["prompt"] == "what is a?" and rows[0]["completion"] == "0" and rows[0]["score"] is None
    annotated = "".join(json.dumps(row | {"score": int(row["completion"])}) + "\n" for row in rows[:3])
    annotated += json.dumps(rows[3]) + "\n"  # no opinion yet
    done = subprocess.run([*offbeat, "feedback", str(place), "-"], input=annotated, capture_output=True, text=True)
    assert done.returncode == 0 and "new       3 scores" in done.stdout and "waiting   1" in done.stdout, done.stderr
    assert rewards(place) == {"a0": 0.0, "a1": 1.0, "b0": 0.0}
    table = run("log", "pending", place).output
    assert "1 completions wait for a score" in table and "b1" in table and "what is b?" in table and "a0" not in table
    assert "4 completions" not in run("log", "pending", place, "--first", 1).output


def test_pending_without_a_tokenizer_has_all_token_ids(tmp_path: Path) -> None:
    row = {"prompt": list(range(100)), "response": list(range(100)), "id": "a1"}
    options = ("--task", "t", "--source", "human")
    run("import", lines(tmp_path / "rows.jsonl", row), "--into", tmp_path / "log", *options)
    found = json.loads(run("log", "pending", tmp_path / "log", "--jsonl").output)
    assert found["prompt_token_ids"] == found["token_ids"] == list(range(100)) and "prompt" not in found
    assert "0 1 2 3" in run("log", "pending", tmp_path / "log").output


def test_every_log_command_takes_the_run_directory_or_the_log(place: Path, tmp_path: Path) -> None:
    for command in ("stats", "fates", "show"):
        of_run, of_log = run("log", command, place), run("log", command, place / "experience")
        assert of_run.exit_code == 0 and of_run.output == of_log.output
    for where in (place, place / "experience"):
        assert "what is a?" in run("log", "pending", where).output
    assert "what is a?" in run("log", "show", place).output, "the run's tokenizer is used"
    assert run("log", "export", place, tmp_path / "groups.jsonl").exit_code == 0
    RunDirectory(tmp_path / "shared").create(parse({"run": {"experience": str(place / "experience")}}))
    assert run("log", "stats", tmp_path / "shared").output == run("log", "stats", place).output
    RunDirectory(tmp_path / "new").create(parse({}))
    empty = run("log", "stats", tmp_path / "new")
    assert empty.exit_code == 1 and "is a run, but there is no experience log at" in empty.output


def test_stats_count_first_and_replayed_uses_by_run_and_task(tmp_path: Path) -> None:
    with ExperienceLog.open(tmp_path / "log") as log:
        log.append([make_group(i) for i in range(3)])
        uses = [("g0", 1, "trainer a"), ("g0", 2, "trainer a"), ("g1", 2, "trainer a"), ("g0", 1, "trainer b")]
        log.record([LedgerEvent(one, LedgerEventKind.TRAINED, step, by=by) for one, step, by in uses])
        log.record([LedgerEvent("g2", LedgerEventKind.TRAINED, 3, by="trainer a")])
        log.record([LedgerEvent("", LedgerEventKind.REWOUND, 2, by="trainer a")])
    printed = run("log", "stats", tmp_path / "log").output
    assert "trained on: 4 uses of 2 groups: 3 first + 1 replayed; at most 2 of one group\n" in printed
    assert "  trainer a: 3 uses of 2 groups: 2 first + 1 replayed; at most 2 of one group\n" in printed
    assert "  trainer b: 1 uses of 1 groups: 1 first + 0 replayed; at most 1 of one group\n" in printed
