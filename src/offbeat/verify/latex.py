r"""Compare a LaTeX answer with a LaTeX reference by math-verify. Use it in a process that can be killed.

The result is True, False, or an exception if the comparison is impossible, for instance with an unreadable reference.
math-verify passes answers to sympy, where a few characters can cost hours. What is slow, such as a tower of powers, is
ended by the deadline of the scoring pool, which kills the process. `screen` only rejects at once what no honest final
answer contains, and a comparison of values at a few points comes before sympy's search for a proof. Formulas that have
too many terms when multiplied out are not compared at all. math-verify's own time limit, an alarm, is off: it cannot
interrupt one long multiplication, and code that it does interrupt continues with half-filled caches.

Importing this module takes a second or two, for sympy and for the first formulas, with which its parser warms up. A
scoring worker spends that when it starts, not in the time of a completion.
"""

import logging
import math
import re
from functools import lru_cache
from typing import Final

from offbeat.imports import install_command

try:
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy import Add, Basic, Expr, Float, MatPow, Mul, Pow
except ImportError as missing:
    raise ImportError(f"comparing formulas needs math-verify: {install_command('math')}") from missing

from offbeat.verify import UnreadableReference
from offbeat.verify.extract import denies, final_answers
from offbeat.verify.numbers import quantity

MOST_ANSWERS: Final = 3
"""Different spellings of the final answer; a completion with more has not answered."""
_READER: Final = [LatexExtractionConfig(boxed_match_priority=0)]
_MATH: Final = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]")

# The limits of `screen`.
CHARACTERS: Final = 500
BRACKETS: Final = 24
"""Number of ( and [."""
DIGITS: Final = 60
"""Digits of one number."""
FUNCTIONS: Final = 10
"""Commands that sympy works on: fractions, roots, sines, unions."""
BARS: Final = 6
"""The parser takes exponential time to find out which bars open and which close."""
CELLS: Final = 64
"""Ampersands and line ends of a matrix."""
DEGREE: Final = 3_000
"""The largest exponent whose terms are counted."""
TERMS: Final = 3_000
"""Terms of a formula that is multiplied out: (x + y + z + w + 1.5)^{30} has 46,376."""
FACTORIAL_DIGITS: Final = 3
BINOMIAL_DIGITS: Final = 4
_UNKNOWN_TERMS: Final = 10**9

_RUN: Final = re.compile(r"\d+")
# A final answer is a value; these ask for a calculation.
_QUESTION: Final = re.compile(r"\\(?:sum|prod|i{0,3}int|oint|lim|det|bigcup|bigcap|frac\{d)(?![A-Za-z])")
_FUNCTION: Final = re.compile(
    r"\\(?!(?:left|right|text[a-z]*|math[a-z]*|cdot|times|quad|qquad|pi|theta|alpha|beta|infty|circ|begin|end|pm|in"
    r"|l?dots|displaystyle|le|ge|leq|geq|neq|mid)(?![A-Za-z]))[A-Za-z]+"
)
_FACTORIAL: Final = re.compile(r"(\d*)\s*!")
_GROUP_FACTORIAL: Final = re.compile(r"[)\]}]\s*!")


def equivalent(text: str, reference: str) -> bool:
    r"""Return True if the final answer of a completion equals the reference as a formula.

    >>> equivalent(r"Hence \boxed{\frac{2}{4}}.", r"\frac12"), equivalent(r"Hence \boxed{0.6}.", r"\frac12")
    (True, False)
    """
    answers = {_stripped(answer) for answer in final_answers(text, counts=_mathematical)}
    if len(answers) > MOST_ANSWERS:
        return False
    wanted = _stripped(reference)
    return all(_equal(answer, wanted) for answer in answers)


def final_formula(text: str) -> str | None:
    r"""Return the final formula without spaces, for maj@k, which counts equal spellings; None if there are several.

    >>> final_formula(r"Hence $\boxed{\frac{1}{2}}$."), final_formula(r"\boxed{1} or \boxed{2}")
    ('\\frac{1}{2}', None)
    """
    found = {"".join(_stripped(answer).split()) for answer in final_answers(text, counts=_mathematical)}
    return found.pop() or None if len(found) == 1 else None


def _equal(answer: str, wanted: str) -> bool:
    if not wanted:
        raise UnreadableReference("the reference answer is empty; fix the data")
    if answer == wanted:
        return True
    left, right = _whole_number(answer), _whole_number(wanted)
    if left is not None and right is not None:
        return left == right
    if screen(answer) or denies(answer) or _contradicts(answer):
        return False
    gold = _parse(wanted)
    if not gold:
        raise UnreadableReference(f"math-verify cannot read the reference answer {wanted!r:.200}; fix the data")
    found = _parse(answer)
    if not found or _differ_in_value(gold[0], found[0]):
        return False
    if _terms(found[0]) > max(TERMS, _terms(gold[0])):
        return False  # a final answer that nobody can check
    return _verify(gold, found)


def _terms(formula: object) -> int:
    """Bound the number of terms of a formula that is multiplied out; sympy's time grows with it."""
    if not isinstance(formula, Basic):
        return 1
    match formula:
        case Add():
            terms = sum(_terms(part) for part in formula.args)
        case Mul():
            terms = math.prod(_terms(part) for part in formula.args)
        case Pow(base=base, exp=exponent) if exponent.is_Integer:
            kinds, times = _terms(base), min(abs(int(exponent)), DEGREE)
            terms = math.comb(times + kinds - 1, times)
        case MatPow():
            terms = _terms(formula.base) ** min(abs(int(formula.exp)), 99) if formula.exp.is_Integer else _UNKNOWN_TERMS
        case _:
            terms = sum(_terms(part) for part in formula.args)
    return min(max(terms, 1), _UNKNOWN_TERMS)


def _differ_in_value(gold: object, found: object) -> bool:
    """Return True if two formulas differ at a few points, which is faster than sympy's search for a proof.

    Formulas without a value at those points are left to math-verify. It rounds floats, so with them only a large
    difference counts.
    """
    if not isinstance(gold, Expr) or not isinstance(found, Expr):
        return False
    tolerance = 1e-2 if gold.has(Float) or found.has(Float) else 1e-6
    symbols = sorted(gold.free_symbols | found.free_symbols, key=str)
    for first in (0.37, 1.61):
        point = {symbol: first + 0.29 * place for place, symbol in enumerate(symbols)}
        try:
            left, right = (complex(side.evalf(15, subs=point)) for side in (gold, found))
            differ = abs(left - right) > tolerance * max(1.0, abs(left), abs(right))
        except Exception:  # the boundary to sympy: math-verify may still compare what sympy cannot evaluate
            return False
        if differ:
            return True
    return False


def _whole_number(latex: str) -> int | None:
    """Return the value of a formula that is a whole number, without sympy."""
    found = quantity(latex) if "=" not in latex else None
    return int(found.value) if found is not None and found.value.denominator == 1 else None


def _contradicts(answer: str) -> bool:
    """Return True if an answer sets different numbers equal, as in '1 = 2 = 3': math-verify would take the last."""
    values = {one.value for one in map(quantity, answer.split("=")) if one is not None}
    return len(values) > 1


def _stripped(latex: str) -> str:
    """Return the formula of an answer: the one between `$` if there is one, without a final period."""
    formulas = [next(filter(None, match.groups())) for match in _MATH.finditer(latex[:2_000])]
    if len(formulas) == 1 and not re.search(r"\d", _MATH.sub("", latex)):
        latex = formulas[0]
    return latex.strip().rstrip(".").strip()


def _mathematical(words: str) -> bool:
    """Return True if the text after "the answer is" can be a formula."""
    return len(words) <= 3 or any(c.isdigit() or c in "\\$^=" for c in words)


@lru_cache(maxsize=1_000)
def _parse(latex: str) -> list[object]:
    """Parse with math-verify's LaTeX reader only: its reader for plain text calls eval. Empty if it reads nothing."""
    boxed = f"\\boxed{{{latex}}}"
    return list(parse(boxed, _READER, fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True))


def _verify(gold: list[object], found: list[object]) -> bool:
    return bool(verify(gold, found, timeout_seconds=None, raise_on_error=True))


def screen(latex: str) -> str:
    r"""Return why an answer is too expensive to compare; empty if it is not.

    >>> screen(r"\frac{\sqrt{3}}{2}"), screen(r"(x^2+1)^{10}e^{-x^2}")
    ('', '')
    >>> screen("12345!"), screen(r"\sum_{n=1}^{\infty} n")
    ('a factorial of 5 digits', '\\sum in a final answer')
    """
    if len(latex) > CHARACTERS:
        return f"{len(latex)} characters"
    if latex.count("{") != latex.count("}"):
        return "braces that do not match"
    longest = max(map(len, _RUN.findall(latex)), default=0)
    if longest > DIGITS:
        return f"a number of {longest} digits"
    if (functions := len(_FUNCTION.findall(latex))) > FUNCTIONS:
        return f"{functions} functions"
    if latex.count("&") + latex.count(r"\\") > CELLS:
        return "a matrix of too many cells"
    if latex.count("|") > BARS:
        return f"{latex.count('|')} bars"
    if question := _QUESTION.search(latex):
        return f"{question[0]} in a final answer"
    if (opened := latex.count("(") + latex.count("[")) > BRACKETS:
        return f"{opened} brackets"
    return _screen_factorials(latex, longest)


def _screen_factorials(latex: str, longest: int) -> str:
    digits = max((len(found[1]) for found in _FACTORIAL.finditer(latex)), default=0)
    if digits > FACTORIAL_DIGITS:
        return f"a factorial of {digits} digits"
    if re.search(r"![\s)}\]]*!", latex):
        return "a factorial of a factorial"
    if _GROUP_FACTORIAL.search(latex) and ("^" in latex or longest > FACTORIAL_DIGITS):
        return "a factorial of a formula of large numbers"
    return "a binomial of large numbers" if "binom" in latex and longest > BINOMIAL_DIGITS else ""


def _warm_up() -> None:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limit is off
    for latex in (r"\frac{\sqrt{3}x^2}{2}", "(1, 2]", r"\{1, 2\}", r"\sin(\pi) + x"):
        _verify(_parse("x^2 = 1"), _parse(latex))


_warm_up()
