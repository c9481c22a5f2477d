"""The nearest valid name to one that is not: every refusal of a name ends in it."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(word: str, valid: Iterable[str]) -> str:
    """A hint for a person.

    >>> nearest("rec-onside", ["grpo", "rec-oneside-is"])
    "did you mean 'rec-oneside-is'?"
    >>> nearest("x", ["grpo", "dapo"])
    'valid: grpo, dapo'
    """
    known = list(valid)
    close = get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"valid: {', '.join(known)}"
