"""An interrupt that comes while an event loop is made waits until the loop can handle it."""

import asyncio
import signal
from collections.abc import Iterator

import pytest

from offbeat.run.event_loop import event_loop_runs, run_coroutine

new_event_loop = asyncio.events.new_event_loop


@pytest.fixture
def interrupts() -> Iterator[list[bool]]:
    """For each interrupt that was handled: did a loop run?"""
    found: list[bool] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: found.append(event_loop_runs()))
    yield found
    signal.signal(signal.SIGINT, before)


async def answer() -> int:
    return 42


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_while_the_loop_is_made_is_handled_when_it_runs(
    times: int, interrupts: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = signal.getsignal(signal.SIGINT)

    def interrupted_loop() -> asyncio.AbstractEventLoop:
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
        assert interrupts == []
        return new_event_loop()

    monkeypatch.setattr(asyncio.events, "new_event_loop", interrupted_loop)
    assert run_coroutine(answer()) == 42
    assert interrupts == [True] * times and signal.getsignal(signal.SIGINT) is handler


@pytest.mark.filterwarnings("ignore:coroutine 'run_coroutine.<locals>.released' was never awaited")
def test_an_interrupt_is_not_forgotten_if_the_loop_cannot_be_made(
    interrupts: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = signal.getsignal(signal.SIGINT)

    def no_loop() -> asyncio.AbstractEventLoop:
        signal.raise_signal(signal.SIGINT)
        raise OSError(24, "too many open files")

    monkeypatch.setattr(asyncio.events, "new_event_loop", no_loop)
    waiting = answer()
    with pytest.raises(OSError, match="too many open files"):
        run_coroutine(waiting)
    waiting.close()
    assert interrupts == [False] and signal.getsignal(signal.SIGINT) is handler


def test_a_handler_that_is_set_in_the_loop_stays(interrupts: list[bool]) -> None:
    """After the first interrupt of a run, the second one ends it at once."""

    async def set_another() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    run_coroutine(set_another())
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
