r"""Whether a LaTeX answer equals a LaTeX reference, by math-verify. For a process that can be killed.

The verdict is three-valued: True, False, or an exception where nobody can say, as with an unreadable reference.
math-verify hands answers to sympy, where a few characters can cost hours, so `screen.py` refuses what nobody writes as
a final answer, and a comparison of values at a few points comes before sympy's search for a proof. What is still slow
is left to the deadline of the scoring pool, which kills the process. math-verify's own time limit, an alarm, is not
used: it cannot interrupt one long multiplication, and what it does interrupt goes on with half-filled caches.

Importing this module takes a second or two: sympy, and the first formulas while its parser warms up. So a scoring
worker pays that when it starts, and not out of a completion's time.
"""

import logging
import re
from functools import lru_cache
from typing import Final

try:
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy import Expr, Float
except ImportError as missing:
    raise ImportError("formulas are compared by math-verify: pip install 'offbeat[math]'") from missing

from offbeat.tasks.extract import denies, final_answers
from offbeat.tasks.numbers import quantity
from offbeat.tasks.screen import screened
from offbeat.tasks.verify import UnreadableReference

MOST_ANSWERS: Final = 3
"""Different spellings of the final answer that are compared; whoever boxes more has not answered."""
_READER: Final = [LatexExtractionConfig(boxed_match_priority=0)]
_MATH: Final = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]")


def equivalent(text: str, reference: str) -> bool:
    r"""Whether a completion's final answer equals the reference, as formulas.

    >>> equivalent(r"Hence \boxed{\frac{2}{4}}.", r"\frac12"), equivalent(r"Hence \boxed{0.6}.", r"\frac12")
    (True, False)
    >>> equivalent(r"Hence \boxed{9^{9^{9^{9}}}}.", "2")
    False
    """
    answers = {_stripped(answer) for answer in final_answers(text, counts=_mathematical)}
    if len(answers) > MOST_ANSWERS:
        return False
    wanted = _stripped(reference)
    return all(_equal(answer, wanted) for answer in answers)


def final_formula(text: str) -> str | None:
    r"""The formula a completion answers with, without spaces: what maj@k counts. Equal spellings count together only.

    >>> final_formula(r"Hence $\boxed{\frac{1}{2}}$."), final_formula(r"\boxed{1} or \boxed{2}")
    ('\\frac{1}{2}', None)
    """
    found = {"".join(_stripped(answer).split()) for answer in final_answers(text, counts=_mathematical)}
    return found.pop() or None if len(found) == 1 else None


def _equal(answer: str, wanted: str) -> bool:
    if not wanted:
        raise UnreadableReference("the reference answer is empty")
    if answer == wanted:
        return True
    left, right = _whole(answer), _whole(wanted)
    if left is not None and right is not None:
        return left == right
    if screened(answer) or denies(answer) or _contradicts(answer):
        return False
    gold = _parsed(wanted)
    if not gold:
        raise UnreadableReference(f"math-verify cannot read the reference answer {wanted!r:.200}")
    found = _parsed(answer)
    return bool(found) and not _plainly_different(gold[0], found[0]) and _verify(gold, found)


def _plainly_different(gold: object, found: object) -> bool:
    """Whether two formulas differ in value at a few points: quicker than sympy's search for a proof that they do not.

    Floats are left to math-verify, which rounds them, and so is all that has no value at those points.
    """
    if not isinstance(gold, Expr) or not isinstance(found, Expr) or gold.has(Float) or found.has(Float):
        return False
    symbols = sorted(gold.free_symbols | found.free_symbols, key=str)
    for first in (0.37, 1.61):
        point = {symbol: first + 0.29 * place for place, symbol in enumerate(symbols)}
        try:
            left, right = (complex(side.evalf(15, subs=point)) for side in (gold, found))
            apart = abs(left - right) > 1e-6 * max(1.0, abs(left), abs(right))
        except Exception:  # the boundary to sympy: what it cannot evaluate here, math-verify may still compare
            return False
        if apart:
            return True
    return False


def _whole(latex: str) -> int | None:
    """The whole number a formula is, which needs no sympy."""
    found = quantity(latex) if "=" not in latex else None
    return int(found.value) if found is not None and found.value.denominator == 1 else None


def _contradicts(answer: str) -> bool:
    """Whether numbers that differ are set equal, as in '1 = 2 = 3': math-verify would take the last."""
    values = {one.value for one in map(quantity, answer.split("=")) if one is not None}
    return len(values) > 1


def _stripped(latex: str) -> str:
    """The formula of an answer: the one between `$` where there is one, without a last full stop."""
    formulas = [next(filter(None, match.groups())) for match in _MATH.finditer(latex[:2_000])]
    if len(formulas) == 1 and not re.search(r"\d", _MATH.sub("", latex)):
        latex = formulas[0]
    return latex.strip().rstrip(".").strip()


def _mathematical(words: str) -> bool:
    """Whether words after "the answer is" can be a formula."""
    return len(words) <= 3 or any(c.isdigit() or c in "\\$^=" for c in words)


@lru_cache(maxsize=1_000)
def _parsed(latex: str) -> list[object]:
    """What math-verify reads, empty where it reads nothing. By its LaTeX reader only: the one for plain text evals."""
    boxed = f"\\boxed{{{latex}}}"
    return list(parse(boxed, _READER, fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True))


def _verify(gold: list[object], found: list[object]) -> bool:
    return bool(verify(gold, found, timeout_seconds=None, raise_on_error=True))


def _warm_up() -> None:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the time limit that we keep ourselves
    for latex in (r"\frac{\sqrt{3}x^2}{2}", "(1, 2]", r"\{1, 2\}", r"\sin(\pi) + x"):
        _verify(_parsed("x^2 = 1"), _parsed(latex))


_warm_up()
