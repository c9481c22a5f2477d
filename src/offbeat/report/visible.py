"""Text that a model or a stranger wrote: nothing in it acts, and nothing in it hides."""

import unicodedata
from collections.abc import Iterator
from itertools import groupby
from typing import Final

MOST_ALIKE: Final = 3
MOST_MARKS: Final = 4
"""On one letter; no writing system needs more."""


def pieces(text: str) -> Iterator[tuple[str, bool]]:
    """Runs of the text, each with whether it is plain; control characters and direction marks are spelled out.

    So are marks that would be piled on one letter until they cover the lines above. The same many times over is
    counted.

    >>> list(pieces("42\\x1b[2J\\u202e\\nnext"))
    [('42', True), ('\\\\x1b', False), ('[2J', True), ('\\\\u202e', False), ('\\nnext', True)]
    """
    for plain, run in groupby(zip(text, _plain(text), strict=True), lambda pair: pair[1]):
        written = "".join(c for c, _ in run)
        yield (written if plain else "".join(_spelled(c, len(list(same))) for c, same in groupby(written))), plain


def _spelled(character: str, times: int) -> str:
    """Its escape, and how often, where that is shorter."""
    name = ascii(character)[1:-1]
    return name * times if times <= MOST_ALIKE else f"{name}×{times}"


def _plain(text: str) -> Iterator[bool]:
    """Of each character."""
    marks = 0
    for c in text:
        marks = marks + 1 if unicodedata.category(c) in ("Mn", "Me") else 0
        yield (c.isprintable() or c == "\n") and marks <= MOST_MARKS


def visible(text: str) -> str:
    """The whole text, harmless in a page and in a terminal; lines stay lines.

    >>> visible("42\\x07"), visible("42" + "\\x00" * 500)
    ('42\\\\x07', '42\\\\x00×500')
    """
    return "".join(piece for piece, _ in pieces(text))


def cut(text: str, most: int) -> tuple[str, int]:
    """At most so many characters, and how many were left out.

    >>> cut("abcdef", 4), cut("abc", 4)
    (('abcd', 2), ('abc', 0))
    """
    return text[:most], max(0, len(text) - most)
