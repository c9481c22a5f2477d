"""The pipes of an untrusted process: every byte is counted while it is read, and every wait has a deadline."""

import os
import selectors
import subprocess
import time
from collections.abc import Callable
from typing import Final, Literal

_CHUNK: Final = 1 << 16
_ERRORS_KEPT: Final = 2000
"""Bytes at the end of standard error to keep for messages."""

ReadEnd = Literal["done", "closed", "timeout", "overflow"]


class ProcessPipes:
    """Sends to a process without blocking, and reads at most `max_bytes` from each of its outputs.

    >>> process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    >>> with process, ProcessPipes(process, max_bytes=100) as cat:
    ...     cat.send(b"hello")
    ...     cat.close_input()
    ...     cat.read_until(lambda: False, time.monotonic() + 9), bytes(cat.received)
    ('closed', b'hello')
    """

    def __init__(self, process: "subprocess.Popen[bytes]", max_bytes: int) -> None:
        if process.stdin is None or process.stdout is None or process.stderr is None:
            raise ValueError("the process needs all three pipes: start it with stdin, stdout and stderr = PIPE")
        self._stdin, self._stdout, self._stderr = process.stdin, process.stdout, process.stderr
        self._max_bytes = max_bytes
        self._outgoing = bytearray()
        self._closing_input = False
        self._bytes_read = {self._stdout.fileno(): 0, self._stderr.fileno(): 0}
        self.received = bytearray()
        self.errors = bytearray()
        self._selector = selectors.DefaultSelector()
        for pipe in (self._stdin, self._stdout, self._stderr):
            os.set_blocking(pipe.fileno(), False)
        for descriptor in self._bytes_read:
            self._selector.register(descriptor, selectors.EVENT_READ)

    def __enter__(self) -> "ProcessPipes":
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        for pipe in (self._stdin, self._stdout, self._stderr):
            pipe.close()

    def send(self, data: bytes) -> None:
        if not self._stdin.closed:
            self._outgoing += data
            self._flush()

    def close_input(self) -> None:
        """Close its standard input after everything queued has been written."""
        self._closing_input = True
        if not self._stdin.closed:
            self._flush()

    def read_until(self, done: Callable[[], bool], until: float) -> ReadEnd:
        """Read and write until `done()`, both outputs are closed, the time is up, or an output is too long."""
        while not done():
            if max(self._bytes_read.values()) > self._max_bytes:
                return "overflow"
            if not self._bytes_read.keys() & self._selector.get_map().keys():
                return "closed"
            left = until - time.monotonic()
            if left <= 0:
                return "timeout"
            for key, _ in self._selector.select(left):
                if key.fd in self._bytes_read:
                    self._read(key.fd)
                else:
                    self._flush()
        return "done"

    def _flush(self) -> None:
        """Write what fits, and watch standard input only while something is left to write."""
        watched = self._stdin.fileno() in self._selector.get_map()
        try:
            if self._outgoing:
                del self._outgoing[: os.write(self._stdin.fileno(), self._outgoing[:_CHUNK])]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # it reads no more, but its output still counts
            self._outgoing.clear()
            self._closing_input = True
        if self._outgoing and not watched:
            self._selector.register(self._stdin, selectors.EVENT_WRITE)
        elif not self._outgoing and watched:
            self._selector.unregister(self._stdin)
        if self._closing_input and not self._outgoing:
            self._stdin.close()

    def _read(self, descriptor: int) -> None:
        data = os.read(descriptor, _CHUNK)
        self._bytes_read[descriptor] += len(data)
        if not data:
            self._selector.unregister(descriptor)
        elif descriptor == self._stdout.fileno():
            self.received += data
        else:
            self.errors = (self.errors + data)[-_ERRORS_KEPT:]
