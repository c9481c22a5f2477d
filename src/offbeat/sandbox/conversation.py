"""Talking to a process that cannot be trusted: every byte counted while it is read, every wait with a deadline."""

import os
import selectors
import subprocess
import time
from collections.abc import Callable
from typing import Final, Literal

_CHUNK: Final = 1 << 16
_ERRORS_KEPT: Final = 2000
"""The end of standard error, for people."""

Heard = Literal["enough", "closed", "late", "flood"]


class Conversation:
    """The pipes of a process: what is sent waits until it is taken, what comes back is read up to a cap.

    >>> process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    >>> with process, Conversation(process, cap=100) as cat:
    ...     cat.send(b"hello")
    ...     cat.hang_up()
    ...     cat.listen(lambda: False, time.monotonic() + 9), bytes(cat.received)
    ('closed', b'hello')
    """

    def __init__(self, process: "subprocess.Popen[bytes]", cap: int) -> None:
        if process.stdin is None or process.stdout is None or process.stderr is None:
            raise ValueError("a conversation needs all three pipes")
        self._stdin, self._stdout, self._stderr = process.stdin, process.stdout, process.stderr
        self._cap = cap
        self._outgoing = bytearray()
        self._hanging_up = False
        self._heard = {self._stdout.fileno(): 0, self._stderr.fileno(): 0}
        self.received = bytearray()
        self.errors = bytearray()
        self._selector = selectors.DefaultSelector()
        for pipe in (self._stdin, self._stdout, self._stderr):
            os.set_blocking(pipe.fileno(), False)
        for descriptor in self._heard:
            self._selector.register(descriptor, selectors.EVENT_READ)

    def __enter__(self) -> "Conversation":
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        for pipe in (self._stdin, self._stdout, self._stderr):
            pipe.close()

    def send(self, data: bytes) -> None:
        """Queue bytes for its standard input."""
        if not self._stdin.closed:
            self._outgoing += data
            self._flush()

    def hang_up(self) -> None:
        """Close its standard input once everything queued has been taken."""
        self._hanging_up = True
        if not self._stdin.closed:
            self._flush()

    def listen(self, enough: Callable[[], bool], until: float) -> Heard:
        """Exchange bytes until `enough` says so, both outputs are closed, the time is up, or too much has come."""
        while not enough():
            if max(self._heard.values()) > self._cap:
                return "flood"
            if not self._heard.keys() & self._selector.get_map().keys():
                return "closed"
            left = until - time.monotonic()
            if left <= 0:
                return "late"
            for key, _ in self._selector.select(left):
                if key.fd in self._heard:
                    self._read(key.fd)
                else:
                    self._flush()
        return "enough"

    def _flush(self) -> None:
        """Write what fits; keep the selector watching standard input exactly while something is left."""
        watched = self._stdin.fileno() in self._selector.get_map()
        try:
            if self._outgoing:
                del self._outgoing[: os.write(self._stdin.fileno(), self._outgoing[:_CHUNK])]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # it reads no more; what it still says counts
            self._outgoing.clear()
            self._hanging_up = True
        if self._outgoing and not watched:
            self._selector.register(self._stdin, selectors.EVENT_WRITE)
        elif not self._outgoing and watched:
            self._selector.unregister(self._stdin)
        if self._hanging_up and not self._outgoing:
            self._stdin.close()

    def _read(self, descriptor: int) -> None:
        data = os.read(descriptor, _CHUNK)
        self._heard[descriptor] += len(data)
        if not data:
            self._selector.unregister(descriptor)
        elif descriptor == self._stdout.fileno():
            self.received += data
        else:
            self.errors = (self.errors + data)[-_ERRORS_KEPT:]
