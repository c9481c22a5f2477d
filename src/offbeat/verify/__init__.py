"""Compare the final answer of a completion with the reference. Pure functions, no `eval`, milliseconds on any text.

A completion without an answer is wrong: False. A reference that cannot be read raises `UnreadableReference`.

extract.py  finds the final answer in a completion
numbers.py  reads a number in any spelling
latex.py    compares formulas with math-verify
"""

import re
from fractions import Fraction
from typing import Final

from offbeat.verify.extract import denies, final_answers
from offbeat.verify.numbers import Quantity, quantity

_MARKUP: Final = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}|[$*_`\"]")
_LETTER: Final = re.compile(r"(?:(?:option|choice)\s+)?\(?([A-Z])(?![A-Za-z'’])\)?", re.IGNORECASE)


class UnreadableReference(ValueError):
    """The reference answer is not of the expected kind, so no completion can be compared with it."""


def exact(text: str, reference: str) -> bool:
    """Return True if the final answer is the reference, except for spaces, markup and a final period.

    >>> exact("The answer is **New York**.", "New York"), exact("The answer is New York or Boston.", "New York")
    (True, False)
    """
    wanted = _plain(reference)
    if not wanted:
        raise UnreadableReference(f"the reference answer {reference!r} is empty; fix the data")
    return all(_plain(answer) == wanted for answer in final_answers(text))


def numeric(text: str, reference: str, tolerance: float = 0.0) -> bool:
    r"""Return True if the final answer is the reference number in any spelling; exactly, or within `tolerance`.

    Units are compared if both reference and answer have a known one. '%' is a unit if the reference is 1 or more, and
    means hundredths if it is below 1: "20%" equals "20" and "0.2", but "2000%" does not equal "20".

    >>> numeric(r"9 eggs at $2 make \boxed{\$18.00}", "18"), numeric("The answer is 17 or 18.", "18")
    (True, False)
    >>> numeric("Answer: 1.8 km", "1.8 m"), numeric("#### 3.1416", "3.14159", tolerance=1e-5)
    (False, True)
    """
    wanted = quantity(reference)
    if wanted is None:
        raise UnreadableReference(
            f"the reference answer {reference!r:.200} is not one number; see docs/reference/tasks.md"
        )
    found = [quantity(answer) for answer in final_answers(text, counts=_has_digit)]
    return all(one is not None and _same(one, wanted, Fraction(tolerance)) for one in found)


def choice(text: str, reference: str, options: str = "ABCDE") -> bool:
    r"""Return True if the final answer is the letter of the reference and no other option.

    >>> choice(r"So it is \boxed{\text{(B)}}.", "B"), choice("Answer: B) a dog", "B"), choice("B or C", "B")
    (True, True, False)
    """
    wanted = chosen(reference, options)
    if wanted is None:
        raise UnreadableReference(f"the reference answer {reference!r:.200} is not one of the options {options}")
    found = [chosen(answer, options) for answer in final_answers(text, counts=lambda part: _leading(part) is not None)]
    return all(one == wanted for one in found)


def chosen(answer: str, options: str) -> str | None:
    """Return the option an answer begins with; None if it begins with none or names another one too.

    >>> chosen("(b)", "ABCD"), chosen("A and B", "ABCD"), chosen("B. A cat", "ABCD"), chosen("A cat", "ABCD")
    ('B', None, 'B', None)
    """
    answer = _plain(answer)[:300]
    match = _leading(answer)
    if match is None:
        return None
    letter, rest = match[1].upper(), answer[match.end() :]
    article = match[0] in ("A", "I") or match[0].islower()  # 'A cat' and 'b flat' are not choices
    if letter not in options or (article and rest and rest[0] not in ".:),;"):
        return None
    if re.match(r"\s*(?:is|was)", rest) and denies(rest):
        return None
    others = re.findall(r"\(([A-Z])\)|\b([A-Z])[).:]|(?:\b(?:or|and)\s|[,/&|])\s*\(?([A-Z])\b|\b([B-HJ-Z])\b", rest)
    return letter if {name for names in others for name in names if name in options} <= {letter, ""} else None


def final_number(text: str) -> str | None:
    r"""Return the final number in one fixed spelling, for maj@k; None if there is not exactly one.

    >>> final_number(r"\boxed{1{,}234.50}"), final_number("The answer is 5 or 6.")
    ('2469/2', None)
    """
    found = {one and one.value for one in (quantity(answer) for answer in final_answers(text, counts=_has_digit))}
    value = found.pop() if len(found) == 1 else None
    return None if value is None else str(value)


def _leading(answer: str) -> re.Match[str] | None:
    return _LETTER.match(_plain(answer))


def _plain(answer: str) -> str:
    return " ".join(_MARKUP.sub(r"\1", answer).split()).rstrip(".").strip()


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
