"""Environment variables for a while: what libraries read when they start."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def environment_of(ours: Mapping[str, str]) -> Iterator[None]:
    """With these variables; afterwards this process has its own back.

    >>> with environment_of({"OFFBEAT_EXAMPLE": "1"}):
    ...     os.environ["OFFBEAT_EXAMPLE"]
    '1'
    >>> "OFFBEAT_EXAMPLE" in os.environ
    False
    """
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
