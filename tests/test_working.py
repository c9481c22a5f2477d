"""What a command shows while it works: at once, then again and again, and nothing left behind."""

import io
import time
from collections.abc import Callable

import pytest

from offbeat import working
from offbeat.working import Working


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(working, "TICK", 0.05)
    monkeypatch.setattr(working, "FRAME", 0.01)


def test_a_pipe_gets_one_line_that_grows() -> None:
    out = io.StringIO()
    with Working("loading torch", file=out):
        assert out.getvalue() == "loading torch ."
        until(lambda: out.getvalue().startswith("loading torch ..."))
    assert out.getvalue().endswith(".\n") and out.getvalue().count("\n") == 1
    size = len(out.getvalue())
    time.sleep(0.15)
    assert len(out.getvalue()) == size, "it goes on after the block"


def test_a_short_block_with_a_delay_shows_nothing() -> None:
    out = io.StringIO()
    with Working("reading", after=30.0, file=out):
        pass
    assert out.getvalue() == ""


def test_a_delayed_line_appears_and_the_next_phase_waits_again() -> None:
    out = io.StringIO()
    with Working("reading", after=0.05, file=out) as phase:
        until(lambda: "reading ." in out.getvalue())
        phase.next("writing")
        assert out.getvalue().endswith("\n") and "writing" not in out.getvalue()
        until(lambda: "writing ." in out.getvalue())


def test_a_line_of_output_does_not_join_the_dots(capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    with Working("training", file=out) as phase:
        phase.say("step 1")
        assert out.getvalue() == "training .\n"
        until(lambda: out.getvalue().endswith("training ."))
    assert capsys.readouterr().out == "step 1\n"


def test_a_label_that_changes_begins_a_line_of_its_own() -> None:
    out, labels = io.StringIO(), iter(["loading", "loading", *["training"] * 1000])
    with Working(lambda: next(labels), file=out):
        until(lambda: out.getvalue().startswith("loading ..\ntraining .."))


def test_a_quiet_one_shows_nothing_and_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    with Working("loading", file=out, quiet=True) as phase:
        phase.next("training")
        phase.say("step 1")
        time.sleep(0.15)
    assert out.getvalue() == capsys.readouterr().out == ""


def test_a_terminal_gets_a_spinner_that_erases_itself() -> None:
    out = FakeTerminal()
    with Working("loading torch", file=out):
        until(lambda: "loading torch 0 s" in out.getvalue())
    assert "\n" not in out.getvalue() and out.getvalue().endswith("\r\x1b[2K")


def test_an_error_ends_the_line() -> None:
    out = io.StringIO()
    with pytest.raises(ValueError, match="no model"), Working("loading", file=out):
        raise ValueError("no model")
    assert out.getvalue() == "loading .\n"


def test_a_reader_that_is_gone_does_not_break_the_block() -> None:
    out = io.StringIO()
    with Working("loading", file=out):
        out.close()


def until(seen: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait until `seen()` is true."""

    end = time.monotonic() + seconds
    while not seen():
        assert time.monotonic() < end, "nothing was shown"
        time.sleep(0.005)
