r"""Whether a completion's final answer equals the reference. Pure functions, never `eval`, milliseconds on any text.

True and False are verdicts. A text in which no answer can be found is a wrong answer: False. A reference that cannot be
read raises `UnreadableReference`, because then nobody can say. `extract.py` says which part of a completion is its
final answer, `numbers.py` what counts as a number, `latex.py` compares formulas.
"""

import re
from fractions import Fraction
from typing import Final

from offbeat.verify.extract import denies, final_answers
from offbeat.verify.numbers import Quantity, quantity

_DRESS: Final = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}|[$*_`\"]")
_LETTER: Final = re.compile(r"(?:(?:option|choice)\s+)?\(?([A-Z])(?![A-Za-z'’])\)?", re.IGNORECASE)


class UnreadableReference(ValueError):
    """The reference answer is not of the kind the task says it is; a completion cannot be judged by it."""


def exact(text: str, reference: str) -> bool:
    """Whether the final answer is the reference, character for character but for space, `**` and a last full stop.

    >>> exact("The answer is **New York**.", "New York"), exact("The answer is New York or Boston.", "New York")
    (True, False)
    """
    wanted = _plain(reference)
    if not wanted:
        raise UnreadableReference(f"the reference answer {reference!r} is empty; give the words the answer must have")
    return all(_plain(answer) == wanted for answer in final_answers(text))


def numeric(text: str, reference: str, tolerance: float = 0.0) -> bool:
    r"""Whether the final answer is the reference number, in whatever spelling; exact unless a tolerance is given.

    Units are compared where reference and answer both name one that is known; '%' is a unit where the reference is 1 or
    more, and hundredths where it is below ("20%" answers "20" and "0.2", "2000%" does not answer "20").

    >>> numeric(r"9 eggs at $2 make \boxed{\$18.00}", "18"), numeric("The answer is 17 or 18.", "18")
    (True, False)
    >>> numeric("Answer: 1.8 km", "1.8 m"), numeric("#### 3.1416", "3.14159", tolerance=1e-5)
    (False, True)
    """
    wanted = quantity(reference)
    if wanted is None:
        raise UnreadableReference(f"the reference answer {reference!r:.200} is not one number; see docs/tasks.md")
    found = [quantity(answer) for answer in final_answers(text, counts=_has_digit)]
    return all(one is not None and _same(one, wanted, Fraction(tolerance)) for one in found)


def choice(text: str, reference: str, options: str = "ABCDE") -> bool:
    r"""Whether the final answer is the reference's letter, and no other letter beside it.

    >>> choice(r"So it is \boxed{\text{(B)}}.", "B"), choice("Answer: B) a dog", "B"), choice("B or C", "B")
    (True, True, False)
    """
    wanted = chosen(reference, options)
    if wanted is None:
        raise UnreadableReference(f"the reference answer {reference!r:.200} is not one of the options {options}")
    found = [chosen(answer, options) for answer in final_answers(text, counts=lambda part: _leading(part) is not None)]
    return all(one == wanted for one in found)


def chosen(answer: str, options: str) -> str | None:
    """The one option an answer begins with; None where it begins with none, or names another too.

    >>> chosen("(b)", "ABCD"), chosen("A and B", "ABCD"), chosen("B. A cat", "ABCD"), chosen("A cat", "ABCD")
    ('B', None, 'B', None)
    """
    answer = _plain(answer)[:300]
    match = _leading(answer)
    if match is None:
        return None
    letter, rest = match[1].upper(), answer[match.end() :]
    article = match[0] in ("A", "I") or match[0].islower()  # 'A cat' and 'b flat' choose nothing
    if letter not in options or (article and rest and rest[0] not in ".:),;"):
        return None
    if re.match(r"\s*(?:is|was)", rest) and denies(rest):
        return None
    others = re.findall(r"\(([A-Z])\)|\b([A-Z])[).:]|(?:\b(?:or|and)\s|[,/&|])\s*\(?([A-Z])\b|\b([B-HJ-Z])\b", rest)
    return letter if {name for names in others for name in names if name in options} <= {letter, ""} else None


def final_number(text: str) -> str | None:
    r"""The number a completion answers with, spelled in one way: what maj@k counts.

    >>> final_number(r"\boxed{1{,}234.50}"), final_number("The answer is 5 or 6.")
    ('2469/2', None)
    """
    found = {one and one.value for one in (quantity(answer) for answer in final_answers(text, counts=_has_digit))}
    value = found.pop() if len(found) == 1 else None
    return None if value is None else str(value)


def _leading(answer: str) -> re.Match[str] | None:
    return _LETTER.match(_plain(answer))


def _plain(answer: str) -> str:
    return " ".join(_DRESS.sub(r"\1", answer).split()).rstrip(".").strip()


def _has_digit(answer: str) -> bool:
    return any(c.isdigit() for c in answer)


def _same(answer: Quantity, wanted: Quantity, tolerance: Fraction) -> bool:
    if answer.unit and wanted.unit and answer.unit != wanted.unit:
        return False
    readings = [answer.value]
    if answer.percent and not wanted.percent and 0 < abs(wanted.value) < 1:
        readings = [answer.value / 100]
    if wanted.percent and not answer.percent:
        readings = [answer.value, answer.value * 100]
    return any(abs(value - wanted.value) <= tolerance * abs(wanted.value) for value in readings)
