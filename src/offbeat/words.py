"""Numbers with units, and text made safe to display."""

import unicodedata
from collections.abc import Iterator
from itertools import groupby
from typing import Final

MAX_REPEATS: Final = 3
"""A longer run of one escaped character is written once, with a count."""
MAX_MARKS: Final = 4
"""Combining marks on one letter; no writing system needs more."""


def count(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun: `1 step`, `2 steps`."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def capitalized(text: str) -> str:
    """Capitalize the first letter and nothing else. `pass@1` is a name and stays."""
    return text if text.startswith("pass@") else text[:1].upper() + text[1:]


def duration(seconds: float) -> str:
    """Return a duration with units.

    >>> duration(0.25), duration(42.3), duration(200), duration(7300)
    ('0.2 s', '42 s', '3 min 20 s', '2 h 1 min')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def size(number: float) -> str:
    """Return bytes of a file or a message with their unit, in powers of ten.

    >>> size(512), size(59448), size(2.5e9)
    ('512 B', '59.4 kB', '2.5 GB')
    """
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= limit:
            return f"{number / limit:.1f} {unit}"
    return f"{number:.0f} B"


def memory_size(number: float) -> str:
    """Return bytes of memory with their unit, in powers of two as memory is sold.

    >>> memory_size(3 << 28), memory_size(3 << 30)
    ('768 MiB', '3.0 GiB')
    """
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"


def signed(value: float | None, digits: int = 2) -> str:
    """Return a number with its sign.

    >>> signed(0.5), signed(-0.5, 3), signed(None)
    ('+0.50', '−0.500', 'none')
    """
    return "none" if value is None else f"{value:+.{digits}f}".replace("-", "−")


def visible(text: str) -> str:
    """Return text that is safe to display on a page and in a terminal. Newlines stay.

    >>> visible("42\\x07"), visible("42" + "\\x00" * 500)
    ('42\\\\x07', '42\\\\x00×500')
    """
    return "".join(piece for piece, _ in escaped_pieces(text))


def escaped_pieces(text: str) -> Iterator[tuple[str, bool]]:
    """Split text into pieces, each with True if it is unchanged and False if it is escaped.

    Control characters, direction marks and combining marks stacked on one letter (they would cover the lines above)
    are escaped.

    >>> list(escaped_pieces("42\\x1b[2J\\u202e\\nnext"))
    [('42', True), ('\\\\x1b', False), ('[2J', True), ('\\\\u202e', False), ('\\nnext', True)]
    """
    for safe, characters in groupby(zip(text, _is_safe(text), strict=True), lambda pair: pair[1]):
        piece = "".join(c for c, _ in characters)
        yield (piece if safe else "".join(_escape(c, len(list(same))) for c, same in groupby(piece))), safe


def _escape(character: str, times: int) -> str:
    escape = ascii(character)[1:-1]
    return escape * times if times <= MAX_REPEATS else f"{escape}×{times}"


def _is_safe(text: str) -> Iterator[bool]:
    marks = 0
    for c in text:
        marks = marks + 1 if unicodedata.category(c) in ("Mn", "Me") else 0
        yield (c.isprintable() or c == "\n") and marks <= MAX_MARKS


def truncate(text: str, limit: int) -> tuple[str, int]:
    """Return at most `limit` characters, and how many were removed."""
    return text[:limit], max(0, len(text) - limit)
