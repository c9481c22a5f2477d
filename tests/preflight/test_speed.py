"""Time estimates use the best speed of a machine, and the share of it that is free."""

from pathlib import Path

import pytest

from offbeat.preflight import forecast


def test_the_best_speed_of_a_machine_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = iter([5e9, 245e9, 7e9, 9e9, 7e9, 8e9])
    monkeypatch.setattr(forecast, "measure_speed", lambda: next(measured))
    assert [forecast.machine_speed() for _ in range(4)] == [5e9, 245e9, 245e9, 245e9]
    monkeypatch.setattr(forecast, "_processor", lambda: "another one")
    assert forecast.machine_speed() == 7e9
    (tmp_path / "offbeat" / "cpu-speed.json").write_text("damaged")
    assert forecast.machine_speed() == 8e9


def test_a_call_takes_well_under_a_millisecond_and_some_of_the_machine_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    now = forecast.speed_now()
    assert 1e-8 < now.call < 1e-4 and 0 < now.free <= 1


def test_a_measured_speed_is_that_of_a_processor() -> None:
    assert 1e8 < forecast.measure_speed() < 1e14
