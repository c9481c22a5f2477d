"""The reward function that `torture_scoring.py` has scored: what it must say follows from the text alone."""

import time
from collections.abc import Mapping

from offbeat.types import Json

SECONDS = 0.02
"""Of waiting in each call, so that strikes hit completions and not only the gaps between them."""


def expected(number: int) -> float:
    """Never 0: a 0 that arrives came by accident."""
    return (number % 97 + 1) / 100


def reward(text: str, columns: Mapping[str, Json]) -> float:
    """The text is a number, and what is wrong with it."""
    number, trouble = text.split()
    time.sleep(SECONDS)
    if trouble == "memory":
        hoard = []
        while True:
            hoard.append(bytearray(1 << 24))
    if trouble == "hangs":
        time.sleep(3600)
    if trouble == "raises":
        raise KeyError(number)
    if trouble == "nan":
        return float("nan")
    # Some memory of its own, so that a worker whose limit was lowered from outside notices.
    return expected(int(number)) + 0.0 * len(bytearray(1 << 20))
