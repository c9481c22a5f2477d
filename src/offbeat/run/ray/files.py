"""Where Ray keeps its files: inside the run directory, which is private, and not in /tmp, which every user can read.

The kernel limits the path of a socket to 107 bytes, and Ray adds up to 66 to its temporary directory. If the run
directory is too deep for that, Ray gets a short link to it.
"""

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from offbeat.run.directory import RunDirectory

LONGEST: Final = 107 - 66
"""Bytes of a temporary directory below which Ray's sockets have valid paths."""


@contextlib.contextmanager
def ray_files(directory: RunDirectory) -> Iterator[Path]:
    """Return an empty temporary directory for Ray. At the end its sockets are removed, and logs stay."""
    place = directory.ray.resolve()
    shutil.rmtree(place, ignore_errors=True)  # of an earlier process, which may have been killed
    place.mkdir(mode=0o700)
    link = _short_link(place, directory.name) if len(os.fsencode(place)) > LONGEST else None
    try:
        yield link or place
    finally:
        if link is not None:
            link.unlink(missing_ok=True)
        for sockets in place.glob("session_*/sockets"):
            shutil.rmtree(sockets, ignore_errors=True)


def _short_link(place: Path, run: str) -> Path:
    """Link to the directory from the system's temporary one. A link that a killed process left is replaced."""
    folder = Path(tempfile.gettempdir())
    link = folder / f"ob-{run}"
    with contextlib.suppress(OSError):
        if os.readlink(link) == str(place) and link.lstat().st_uid == os.getuid():
            link.unlink()
    for name in (link, *(folder / f"ob-{secrets.token_hex(4)}" for _ in range(8))):  # another user may have the first
        with contextlib.suppress(FileExistsError):
            name.symlink_to(place)
            return name
    raise FileExistsError(17, "no short link can be made", str(folder))
