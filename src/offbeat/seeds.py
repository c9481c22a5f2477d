"""Independent random streams, derived by name from one seed.

A stream depends only on the seed and its name, never on how many numbers other streams have drawn. So resuming or
reordering work does not change it.
"""

import hashlib


def derive(seed: int, *names: str | int) -> int:
    """Return a 63-bit seed for the stream called `names`.

    >>> derive(7, "red-drop", "group-0")
    473543465181444340
    >>> derive(7, "red-drop", "group-1") == derive(7, "red-drop", "group-0")
    False
    """
    path = "\x1f".join([str(seed), *(f"{type(name).__name__}:{name}" for name in names)])
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") >> 1
