"""The commit that the house is compared with, checked out in a temporary directory."""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from lab.figures import ROOT

BEFORE: Final = "a4ce5e6"
"""The last commit before files were joined to chapters."""


@contextmanager
def earlier_checkout() -> Iterator[Path]:
    """Yield the path of a checkout of `BEFORE`."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "offbeat"
        subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(path)], check=True)
        subprocess.run(["git", "checkout", "-q", BEFORE], cwd=path, check=True)
        yield path
