"""Where results that hold for a whole machine are kept."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """Return `$XDG_CACHE_HOME/offbeat`, or `~/.cache/offbeat`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offbeat"
