"""The reward function of `python -m lab.torture.scoring`. The right reward follows from the text alone."""

import time
from collections.abc import Mapping

from offbeat.types import Json

SECONDS = 0.02
"""Each call waits this long, so that strikes hit completions and not only the gaps between them."""


def expected(number: int) -> float:
    """Return the right reward. It is never 0, so a reward of 0 is an accident."""
    return (number % 97 + 1) / 100


def reward(text: str, columns: Mapping[str, Json]) -> float:
    """Score a text of two words: a number, and what is wrong with the completion."""
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
    # Allocate some memory, so that a worker notices if its limit was lowered from outside.
    return expected(int(number)) + 0.0 * len(bytearray(1 << 20))
