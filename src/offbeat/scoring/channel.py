"""Lines of JSON over a socket, each wait with a deadline. Nothing that arrives is unpickled."""

import json
import socket
import time
from typing import Final, cast

from offbeat.types import Json

Message = dict[str, Json]

_CHUNK: Final = 1 << 16


class ChannelClosed(ConnectionError):
    """The other side is gone."""


def encoded(message: Message) -> bytes:
    """A message as it is sent; `TypeError` where it is not JSON."""
    return json.dumps(message).encode() + b"\n"


class Channel:
    """One end of a connection.

    >>> here, there = (Channel(end) for end in socket.socketpair())
    >>> here.send({"text": "one\\ntwo"}, seconds=1.0)
    >>> there.receive(seconds=1.0)
    {'text': 'one\\ntwo'}
    >>> here.close(), there.close()
    (None, None)
    """

    def __init__(self, end: socket.socket, *, longest: int = 1 << 30) -> None:
        self._socket = end
        self._longest = longest
        self._read = b""

    def send(self, message: Message | bytes, *, seconds: float | None = None) -> None:
        """Send one message, encoded or not; `TimeoutError` where the other side does not take it in time."""
        self._socket.settimeout(seconds)
        try:
            self._socket.sendall(message if isinstance(message, bytes) else encoded(message))
        except ConnectionError as gone:
            raise ChannelClosed(str(gone)) from None

    def receive(self, *, seconds: float | None = None) -> Message:
        """The next message; `TimeoutError` where it is not there in time, `ValueError` where it is not one."""
        until = None if seconds is None else time.monotonic() + seconds
        parts = [self._read]
        size = len(self._read)
        while b"\n" not in parts[-1]:
            self._socket.settimeout(None if until is None else max(until - time.monotonic(), 1e-3))
            try:
                arrived = self._socket.recv(_CHUNK)
            except ConnectionError as gone:
                raise ChannelClosed(str(gone)) from None
            if not arrived:
                raise ChannelClosed("the connection was closed")
            parts.append(arrived)
            size += len(arrived)
            if size > self._longest:
                raise ValueError(f"a message of more than {self._longest} bytes")
        line, _, self._read = b"".join(parts).partition(b"\n")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError(f"not a message: {line[:80]!r}")
        return cast("Message", message)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()
