"""Estimates of time use the lengths of the data."""

from pathlib import Path

import pytest

from offbeat.config import parse
from offbeat.experience.log import ExperienceLog
from offbeat.preflight.forecast import Lengths, ModelFiles, Speed, data_lengths, forecast
from tests.fixtures.tiny_model import save_llama, save_tokenizer
from tests.reports.made_run import group


def test_prompts_are_as_long_as_in_the_data_and_work_follows(tmp_path: Path) -> None:
    save_llama(tmp_path, tied=False)
    save_tokenizer(tmp_path)
    task = {"name": "arithmetic", "options": {"digits": 2}}
    config = parse({"model": {"path": str(tmp_path)}, "task": task, "sampling": {"max_tokens": 16}})
    files = ModelFiles(tmp_path)
    lengths = data_lengths(config, files)
    assert lengths == Lengths(6.0, config.sampling.max_tokens), "17+25= has six characters"
    real, longest = forecast(config, files, lengths), forecast(config, files)
    assert real.training < longest.training and real.calls <= longest.calls and real.trainer == longest.trainer
    assert real.seconds(Speed(1e9, call=1e-6)) > real.seconds(Speed(1e9))


def test_rows_of_an_offline_run_are_as_long_as_in_its_log(tmp_path: Path) -> None:
    with ExperienceLog.open(tmp_path / "log") as log:
        log.append([group(0, 0, 1), group(1, 0, 1)])
    offline = {"run": {"mode": "offline", "experience": str(tmp_path / "log")}, "sampler": {"mode": "offline"}}
    found = data_lengths(parse(offline), ModelFiles(tmp_path))
    assert found is not None and found.prompt == 0
    assert found.completion == pytest.approx((6 + 2 + 2 + 1 + 3) / 4)


def test_evaluations_are_part_of_the_time_of_a_step(tmp_path: Path) -> None:
    save_llama(tmp_path, tied=False)
    base = {"model": {"path": str(tmp_path)}, "steps": 100}
    never, often = (parse(base | {"evaluation": {"every": every}}) for every in (0, 10))
    assert (never.evaluation_plan, never.evaluation_share) == ("", 0)
    assert often.evaluation_plan.startswith("evaluation before training and every 10 steps: 11 × 64 answers")
    seconds = [forecast(one, ModelFiles(tmp_path)).seconds(Speed(1e9, 1e-6)) for one in (never, often)]
    assert seconds[0] < seconds[1]
