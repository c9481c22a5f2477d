"""The protocol of a store: a folder of files that are written once, and small files that are replaced whole."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import BinaryIO, Protocol


@dataclass(frozen=True)
class StoredFile:
    """One entry of a folder listing."""

    name: str
    """Relative to the folder."""
    modified: float
    """Unix seconds."""


class Writer(Protocol):
    """A file being written. Readers ignore it until a manifest names it."""

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`."""

    def finished(self) -> tuple[int, str]:
        """Make the file durable and return its size and sha256."""


class Claim(Protocol):
    """The right to publish."""

    def check(self) -> None:
        """Raise `AnotherPublisher` if another process has taken over."""

    def release(self) -> None:
        """Let another process publish."""


class Store(Protocol):
    """The storage of a weight log. Names are relative and use `/`. A missing file raises `FileNotFoundError`."""

    uri: str

    def list_names(self, folder: str) -> list[str]:
        """Return the file names in a folder; none if the folder does not exist."""

    def list_files(self, folder: str) -> list[StoredFile]:
        """Return the files in a folder with their modification times."""

    def read(self, name: str) -> bytes:
        """Return the content of a file."""

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading."""

    def create(self, name: str) -> AbstractContextManager[Writer]:
        """Create a file, and remove it if the block raises."""

    def put(self, name: str, content: bytes, *, durable: bool = True) -> None:
        """Write or replace a small file in one step: readers see all of it or nothing."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove files durably; files that are already gone are not an error."""

    def claim(self) -> Claim:
        """Become the publisher, or raise `AnotherPublisher`."""
