"""A command in a terminal of a given size, by tmux: what a person would see, and keys pressed."""

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self


class Terminal:
    """One command in one pane."""

    def __init__(self, command: Sequence[str], width: int, height: int) -> None:
        if shutil.which("tmux") is None:
            raise SystemExit("this needs tmux: apt install tmux")
        self._server = f"offbeat-{os.getpid()}-{width}-{time.monotonic_ns()}"
        size, keep = ("-x", str(width), "-y", str(height)), ("set-option", "-g", "remain-on-exit", "on")
        hide = ("set-option", "-g", "status", "off")
        begin = ("new-session", "-d", *size, f"exec {shlex.join(command)}")
        self._tmux("-f", "/dev/null", "start-server", ";", *keep, ";", *hide, ";", *begin)

    def _tmux(self, *arguments: str) -> str:
        done = subprocess.run(["tmux", "-L", self._server, *arguments], capture_output=True, text=True, check=True)
        return done.stdout

    def screen(self) -> list[str]:
        """Its lines."""
        return self._tmux("capture-pane", "-p").removesuffix("\n").split("\n")

    @property
    def title(self) -> str:
        """Which a command to the terminal could have set."""
        return self._tmux("display-message", "-p", "#{pane_title}").strip()

    def press(self, *keys: str) -> None:
        """One after the other."""
        self._tmux("send-keys", *keys)

    def until(self, seen: Callable[[list[str]], bool], seconds: float = 90.0) -> list[str]:
        """The screen once it shows what is waited for, or as it is at the deadline."""
        end = time.monotonic() + seconds
        while not seen(lines := self.screen()) and time.monotonic() < end:
            time.sleep(0.2)
        return lines

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tmux("kill-server")
