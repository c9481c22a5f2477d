"""A store in S3, Google Cloud Storage or Azure, through pyarrow's file systems.

An object appears whole or not at all and is durable once it is acknowledged, so this module needs no rename and no
fsync.
"""

import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO, Final, cast
from urllib.parse import urlsplit

import pyarrow as pa
from pyarrow import fs

from offbeat.errors import AnotherPublisher, WeightLogError
from offbeat.storage.store import Claim, StoredFile, Writer

SCHEMES: Final = ("s3", "gs", "gcs", "abfs", "abfss")
_CLAIM: Final = "publisher.json"


class ObjectStore:
    """The objects under one prefix.

    >>> from pyarrow.fs import _MockFileSystem
    >>> store = ObjectStore("mock://run", _MockFileSystem(), "run")
    >>> store.put("versions/0000000001.json", b"{}")
    >>> store.list_names("versions"), store.read("versions/0000000001.json")
    (['0000000001.json'], b'{}')
    """

    def __init__(self, uri: str, filesystem: fs.FileSystem, root: str) -> None:
        self.uri = uri
        self._fs = filesystem
        self._root = root.rstrip("/")
        self._folders: set[str] = set()

    @classmethod
    def at(cls, uri: str) -> "ObjectStore":
        """Open a URI. pyarrow finds credentials and endpoints; secrets in the URI do not enter `self.uri`."""
        scheme = urlsplit(uri).scheme
        if scheme not in SCHEMES:
            raise WeightLogError(
                f"{uri}: a weight log needs a local path or an object store ({', '.join(SCHEMES)}), where a file "
                f"appears in one step; {scheme} is not supported"
            )
        try:
            filesystem, root = fs.FileSystem.from_uri(uri)
        except (pa.ArrowInvalid, OSError) as error:
            raise WeightLogError(f"cannot open the weight log in {scheme}: {error}") from error
        return cls(f"{scheme}://{root}", filesystem, root)

    def list_names(self, folder: str) -> list[str]:
        return [file.name for file in self.list_files(folder)]

    def list_files(self, folder: str) -> list[StoredFile]:
        listing = self._fs.get_file_info(fs.FileSelector(self._path(folder), allow_not_found=True))
        return [
            StoredFile(info.base_name, info.mtime.timestamp() if info.mtime else 0.0)
            for info in listing
            if info.is_file
        ]

    def read(self, name: str) -> bytes:
        with self.open(name) as stream:
            return stream.read()

    def open(self, name: str) -> BinaryIO:
        return cast(BinaryIO, self._fs.open_input_stream(self._path(name)))

    @contextmanager
    def create(self, name: str) -> Iterator[Writer]:
        stream = self._stream(name)
        try:
            yield _ObjectWriter(stream)
        except BaseException:
            with suppress(OSError):
                stream.close()
                self._fs.delete_file(self._path(name))
            raise

    def put(self, name: str, content: bytes, *, durable: bool = True) -> None:
        with self._stream(name) as stream:
            stream.write(content)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                self._fs.delete_file(self._path(name))

    def claim(self) -> Claim:
        return _ObjectClaim(self)

    def _stream(self, name: str) -> pa.NativeFile:
        path = self._path(name)
        folder = path.rsplit("/", 1)[0]
        if folder not in self._folders:
            self._fs.create_dir(folder, recursive=True)
            self._folders.add(folder)
        return self._fs.open_output_stream(path)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


class _ObjectWriter:
    def __init__(self, stream: pa.NativeFile) -> None:
        self._stream = stream
        self._sha256 = hashlib.sha256()
        self._bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        self._stream.write(data)
        self._sha256.update(data)
        self._bytes += len(data)

    def finished(self) -> tuple[int, str]:
        self._stream.close()
        return self._bytes, self._sha256.hexdigest()


class _ObjectClaim:
    """A claim that the newest publisher wins: an object store cannot tell a crashed publisher from a slow one.

    The earlier publisher notices at its next publish, and stops.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._token = secrets.token_hex(8)
        owner = {"token": self._token, "process": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        store.put(_CLAIM, json.dumps(owner).encode())

    def check(self) -> None:
        try:
            found = json.loads(self._store.read(_CLAIM))
        except FileNotFoundError:
            found = {}
        if found.get("token") != self._token:
            raise AnotherPublisher(
                f"{self._store.uri} is being published to by process {found.get('process')} on {found.get('host')}, "
                f"which started after this one; nothing was published. Stop one of the two"
            )

    def release(self) -> None:
        """Do nothing: the next publisher takes over without asking."""
