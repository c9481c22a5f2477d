"""Durable storage below logs, checkpoints and run directories.

files.py          fsync, atomic replacement, locks: plain functions on local paths
store.py          the protocol `Store`: a folder of files that are written once; on a local disk
object_store.py   a `Store` in S3, Google Cloud Storage or Azure
"""

import os

from offbeat.storage.files import local_path
from offbeat.storage.store import LocalStore, Store


def open_store(uri: str | os.PathLike[str]) -> Store:
    """Open the store at a local path, a `file:` URI, or an object-store URI such as `s3://bucket/run`.

    >>> open_store("weights").uri
    'weights'
    """
    path = local_path(os.fspath(uri))
    if path is not None:
        return LocalStore(path)
    from offbeat.storage.object_store import ObjectStore  # pyarrow loads only if an object store is used

    return ObjectStore.at(os.fspath(uri))
