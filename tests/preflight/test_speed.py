"""Time estimates use one speed per machine."""

from pathlib import Path

import pytest

from offbeat.preflight import speed


def test_the_speed_is_measured_once_per_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = iter([5e9, 245e9, 7e9])
    monkeypatch.setattr(speed, "measure_speed", lambda: next(measured))
    assert [speed.machine_speed() for _ in range(3)] == [5e9] * 3
    monkeypatch.setattr(speed, "_processor", lambda: "another one")
    assert speed.machine_speed() == 245e9
    (tmp_path / "offbeat" / "cpu-speed.json").write_text("damaged")
    assert speed.machine_speed() == 7e9


def test_a_measured_speed_is_that_of_a_processor() -> None:
    assert 1e8 < speed.measure_speed() < 1e14
