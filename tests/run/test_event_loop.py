"""An interrupt that comes while an event loop is made stops the run; it leaves no half-made loop."""

import asyncio
import signal

import pytest

from offbeat.drive import Stopper
from offbeat.run.event_loop import event_loop_runs, run_coroutine

new_event_loop = asyncio.events.new_event_loop


async def answer() -> int:
    return 42


def test_an_interrupt_while_the_loop_is_made_is_no_exception(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted_loop() -> asyncio.AbstractEventLoop:
        signal.raise_signal(signal.SIGINT)
        return new_event_loop()

    monkeypatch.setattr(asyncio.events, "new_event_loop", interrupted_loop)
    stopper = Stopper()
    with stopper.on_interrupt():
        assert run_coroutine(answer()) == 42
    assert stopper.why == "interrupted" and "stopping after this step" in capsys.readouterr().err


def test_before_and_after_it_an_interrupt_ends_the_run_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), Stopper().on_interrupt():
        signal.raise_signal(signal.SIGINT)
    run_coroutine(answer())
    assert not event_loop_runs()
