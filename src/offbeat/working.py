"""Show that work goes on: a spinner in a terminal, elsewhere a line that grows by a dot.

    loading torch ....

It goes to stderr, so that the output of a command stays what it is, and it imports nothing, so that the first line is
there before anything heavy is loaded.
"""

import itertools
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Final, Self, TextIO

TICK: Final = 1.0
"""Seconds between two dots, so that nobody waits 2 seconds without one, on a busy machine either."""
SOON: Final = 0.3
"""Seconds after which to show a block that is often quick."""
FRAME: Final = 0.25
"""Seconds between two frames of the spinner."""


class Working:
    """Names what a block does while it runs.

    The line appears after `after` seconds. With 0 it appears before the block begins, which imports need: loading a
    large library stops all threads.

    >>> with Working("loading torch", file=sys.stdout) as working:
    ...     working.say("torch is there")
    ...     working.next("loading the model")
    loading torch .
    torch is there
    loading the model .
    """

    def __init__(
        self, what: str | Callable[[], str], *, after: float = 0.0, file: TextIO | None = None, quiet: bool = False
    ) -> None:
        """Name the phase: a text, or a function that is asked again for each dot. `quiet` shows nothing at all."""
        self._what, self._after, self._file, self._quiet = what, after, file or sys.stderr, quiet
        self._label = ""
        self._in_place = self._file.isatty()
        self._frames = itertools.cycle("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏")
        self._changed = threading.Condition()
        self._shown = self._ended = False
        self._begun = self._quiet_until = self._written = time.monotonic()

    def __enter__(self) -> Self:
        if self._quiet:
            return self
        self.next(self._what)
        threading.Thread(target=self._watch, name="working", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Stop before the end of the block."""
        with self._changed:
            self._ended = True
            self._end_line()
            self._changed.notify()

    def next(self, what: str | Callable[[], str]) -> None:
        """Begin the next phase."""
        with self._changed:
            self._end_line()
            self._what, self._begun = what, time.monotonic()
            self._quiet_until = min(self._begun + self._after, self._written + TICK)
            if not self._after:
                self._draw()
            self._changed.notify()

    def say(self, line: str) -> None:
        """Print a line to stdout, above the phase that goes on."""
        if not self._quiet:
            self.make_room()
            print(line, flush=True)

    def make_room(self) -> None:
        """End the line, because something else is printed now."""
        with self._changed:
            self._end_line()
            self._written = time.monotonic()
            self._quiet_until = self._written + TICK
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while not self._ended:
                tick = FRAME if self._in_place else TICK
                pause = tick if self._shown else max(0.0, self._quiet_until - time.monotonic())
                if not self._changed.wait(pause):
                    self._draw()

    def _draw(self) -> None:
        if self._quiet:
            return
        label = self._what if isinstance(self._what, str) else self._what()
        if self._in_place:
            seconds = time.monotonic() - self._begun
            self._write(f"\r\x1b[2K{next(self._frames)} {label}" + (f" {seconds:.0f} s" if seconds > TICK else ""))
        elif self._shown and label == self._label:
            self._write(".")
        else:
            self._end_line()
            self._write(f"{label} .")
        self._shown, self._label = True, label

    def _end_line(self) -> None:
        if self._shown:
            self._write("\r\x1b[2K" if self._in_place else "\n")
        self._shown = False

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # the reader is gone: the command itself finds out
            self._file.write(text)
            self._file.flush()
        self._written = time.monotonic()
