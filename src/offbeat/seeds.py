"""One seed, many streams of randomness, each reached by name.

A stream depends on its name alone, never on how many numbers others have drawn, so that resuming or
reordering work does not change it.
"""

import hashlib


def derive(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the stream called `names` under `seed`.

    >>> derive(7, "red-drop", "group-0")
    473543465181444340
    >>> derive(7, "red-drop", "group-1") == derive(7, "red-drop", "group-0")
    False
    """
    path = "\x1f".join([str(seed), *(f"{type(name).__name__}:{name}" for name in names)])
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") >> 1
