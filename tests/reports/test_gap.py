"""`offbeat gap`: mismatches that were put in are found, and what it cannot compute is said."""

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.cli.main import app
from offbeat.config import parse
from offbeat.errors import RunError
from offbeat.reports.gap import GapReport, GapRow, RatioPart, measure_gap
from offbeat.run.directory import RunDirectory

run = CliRunner(env={"COLUMNS": "200"}).invoke


def part(size: float) -> RatioPart:
    return RatioPart(size, size / 2, 0.0)


def row(engine: float, lag: float | None, *, name: str = "all") -> GapRow:
    others = (None, None) if lag is None else (part(lag), part(engine + lag))
    return GapRow(name, 100, part(engine), *others, None)


def report(engine: float, lag: float | None, earlier: float | None = None) -> GapReport:
    return GapReport((row(engine, lag, name="1"),), row(engine, lag), 4, 4, 0, {"published": 100}, earlier, False)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (report(0.03, 0.07), "engine mismatch is 30% of what the ratio sees"),
        (report(0.03, 0.07), "model.serve"),
        (report(0.001, 0.07), "Lag decides"),
        (report(1e-7, 0.07), "compute alike"),
        (report(0.03, 0.07, earlier=0.001), "one version late"),
        (report(0.03, 0.07, earlier=0.02), "model.serve"),
        (report(0.03, None), "engine mismatch: mean (1 − ρ)₊ 0.015 of the engine."),
    ],
)
def test_the_verdict_names_the_part_of_the_engine_and_what_to_do(found: GapReport, said: str) -> None:
    assert said in str(found).splitlines()[-1]


def test_a_bucket_without_lag_shows_a_dash_and_what_is_gone_is_counted() -> None:
    text = str(replace(report(0.03, None), gone=512, rounded=True))
    assert "–" in text.splitlines()[2] and "512 tokens" in text and "rounds weights" in text


def made(place: Path, **changes: object) -> RunDirectory:
    directory = RunDirectory(place / "run")
    directory.create(parse(changes))
    return directory


def test_a_run_without_a_weight_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="has no weight log"):
        measure_gap(made(tmp_path))


def test_a_run_whose_samples_have_other_log_probs_is_refused(tmp_path: Path) -> None:
    directory = made(tmp_path, sampling={"top_p": 0.9}, objective={"preset": "red-drop"})
    directory.weights.mkdir()
    with pytest.raises(RunError, match="samples with top_p"):
        measure_gap(directory)


def test_a_run_that_has_not_begun_is_refused(tmp_path: Path) -> None:
    directory = made(tmp_path)
    directory.weights.mkdir()
    with pytest.raises(RunError, match="no experience log yet"):
        measure_gap(directory)


def test_a_directory_without_a_run_is_a_sentence(tmp_path: Path) -> None:
    result = run(app, ["gap", str(tmp_path)])
    assert result.exit_code == 1 and "holds no run" in result.output
