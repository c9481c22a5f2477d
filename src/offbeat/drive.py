"""Drive a run from its start to its end in this process: its display, Ctrl-C, callbacks, threads. No torch before that.

train(config, directory) ── in a thread, if an event loop is running already (a notebook)
    events ──► live view, callbacks
    Ctrl-C ──► before the loop runs: end at once; then: end after the step; the second time: end at once
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from offbeat.config import Config
from offbeat.events import EventKind
from offbeat.imports import paused_collector
from offbeat.run.directory import RunDirectory, RunLock
from offbeat.run.event_loop import event_loop_runs, outside_event_loop
from offbeat.run.journal import FileJournal
from offbeat.types import Json
from offbeat.working import Working

if TYPE_CHECKING:
    from offbeat.experience.ledger import Ledger
    from offbeat.run.journal import Phase
    from offbeat.run.loop import Loop

AGAIN_SECONDS: Final = 0.05
"""Until a forgotten interrupt is sent again, when the destructor has long ended."""

Callback = Callable[[Mapping[str, Json]], str | None]
"""Called with every event of a run. If it returns a text, the run ends after its step, with that text as the reason."""


@dataclass(frozen=True)
class DriveResult:
    """How a run ended."""

    ledger: "Ledger"
    finished: bool
    """False if it was stopped before its end, with a checkpoint."""
    why: str
    """Why it ended before its last step; empty after the last step."""


def drive(
    config: Config, directory: RunDirectory, lock: RunLock, *, progress: bool = True, callbacks: Sequence[Callback] = ()
) -> DriveResult:
    """Run to the end, or until it is stopped. Then the lock of the directory is released."""
    if progress and config.evaluation_plan:
        print(config.evaluation_plan)
    with lock:
        return _drive(config, directory, lock, progress, callbacks)


def _drive(
    config: Config, directory: RunDirectory, lock: RunLock, progress: bool, callbacks: Sequence[Callback]
) -> DriveResult:
    with Working("loading torch", quiet=not progress) as working, paused_collector():
        import torch  # noqa: F401  # each takes seconds

        working.next("loading transformers")
        from rich.console import Console

        from offbeat.imports import without_progress_bars
        from offbeat.preflight.checks import lag_findings, missing_engine
        from offbeat.preflight.gpu_session import unchecked_line
        from offbeat.reports.live import LiveView

        working.next("loading offbeat")
        if config.run.place == "ray":
            from offbeat.run.ray.entry import train
        else:
            from offbeat.run.local import train

    for line in [missing_engine(config), unchecked_line()] if progress else []:
        if line:
            print(line, file=sys.stderr)
    config.model.directory()  # a download shows its progress before the view starts
    findings = [] if directory.events.exists() else lag_findings(config)
    stopper = Stopper()
    with (
        without_progress_bars(),  # the view has its own
        LiveView(config, Console(quiet=not progress), stopper.phase) as view,
        stopper.on_interrupt(),
        _fitting_threads(config),
    ):

        def watching(event: Mapping[str, Json]) -> None:
            view(event)
            for callback in callbacks:
                if why := callback(event):
                    stopper.stop(why)

        if findings:
            with FileJournal(directory.events, listener=watching) as journal:
                for one in findings:
                    journal.write(EventKind.EVIDENCE, 0, level=one.level, why=one.text, row=one.row)
        ledger = outside_event_loop(
            lambda: train(config, directory, watching=watching, started=stopper.started, lock=lock)
        )
    loop = stopper.loops[-1]
    return DriveResult(ledger, loop.finished, loop.why_ended)


@dataclass
class Stopper:
    """Stops the loop of a run, also if it is asked to before there is a loop."""

    loops: "list[Loop]" = field(default_factory=list)
    """On Ray, a run that lost a rank continues with a new loop."""
    why: str = ""

    def phase(self) -> "Phase | None":
        """Return what the loop is doing; None before it begins."""
        return self.loops[-1].stopwatch.current if self.loops else None

    def started(self, loop: "Loop") -> None:
        """Take the loop of a run that starts."""
        self.loops.append(loop)
        if self.why:
            loop.stop(self.why)

    def stop(self, why: str) -> None:
        """End the run after its current step, with a checkpoint."""
        self.why = self.why or why
        for loop in self.loops:
            loop.stop(why)

    @contextmanager
    def on_interrupt(self) -> Iterator[None]:
        """Let the first interrupt end the run after its step, and the second end it at once."""
        if threading.current_thread() is not threading.main_thread():  # only the main thread handles signals
            yield
            return

        def interrupted(number: int, frame: object) -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if not self.loops and not event_loop_runs():
                raise KeyboardInterrupt  # nothing is trained yet, so there is nothing to save
            print("stopping after this step, with a checkpoint; press Ctrl-C again to stop at once", file=sys.stderr)
            self.stop("interrupted")

        before = signal.signal(signal.SIGINT, interrupted)
        try:
            with _interrupts_are_kept():
                yield
        finally:
            signal.signal(signal.SIGINT, before)


@contextmanager
def _interrupts_are_kept() -> Iterator[None]:
    """Send an interrupt again that came inside a destructor, where Python only prints and forgets exceptions."""
    before = sys.unraisablehook

    def forgotten(problem: "sys.UnraisableHookArgs") -> None:
        if issubclass(problem.exc_type, KeyboardInterrupt):
            threading.Timer(AGAIN_SECONDS, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            before(problem)

    sys.unraisablehook = forgotten
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextmanager
def _fitting_threads(config: Config) -> Iterator[None]:
    """Train a tiny model on one CPU thread: with such small matrices a second one costs more than it saves."""
    import torch

    from offbeat.preflight.forecast import ModelFiles

    before = torch.get_num_threads()
    if ModelFiles(config.model.directory()).tiny:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
