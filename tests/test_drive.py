"""Ctrl-C before a run has a loop."""

import signal
import sys
import time

import pytest

from offbeat.drive import Stopper


class PressesCtrlC:
    """Is interrupted while it is destroyed, where Python forgets exceptions."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_inside_a_destructor_is_not_forgotten(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), Stopper().on_interrupt():
        broken = PressesCtrlC()
        del broken
        time.sleep(10)
    assert "Traceback" not in capfd.readouterr().err


def test_other_exceptions_of_destructors_go_where_they_went(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails:
        def __del__(self) -> None:
            raise ValueError("closed twice")

    seen: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda problem: seen.append(problem.exc_value))
    with Stopper().on_interrupt():
        broken = Fails()
        del broken
    assert [str(error) for error in seen] == ["closed twice"]
