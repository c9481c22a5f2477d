r"""Whether a LaTeX answer equals a LaTeX reference, by math-verify. For a process that can be killed.

The verdict is three-valued: True, False, or an exception where nobody can say, as with an unreadable reference.
math-verify hands answers to sympy, where a few characters can cost hours, so `screened` refuses what nobody writes as
a final answer, and a comparison of values at a few points comes before sympy's search for a proof. What is still slow
is left to the deadline of the scoring pool, which kills the process. math-verify's own time limit, an alarm, is not
used: it cannot interrupt one long multiplication, and what it does interrupt goes on with half-filled caches.

Importing this module takes a second or two: sympy, and the first formulas while its parser warms up. So a scoring
worker pays that when it starts, and not out of a completion's time.
"""

import logging
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

try:
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy import Expr, Float
except ImportError as missing:
    raise ImportError("formulas are compared by math-verify: pip install 'offbeat[math]'") from missing

from offbeat.verify import UnreadableReference
from offbeat.verify.extract import denies, final_answers
from offbeat.verify.numbers import quantity

CHARACTERS: Final = 500
DEPTH: Final = 8
"""Brackets and braces within one another."""
ROUND_DEPTH: Final = 4
"""Of ( and [ alone: f(g(h(x))) has many readings, and the parser tries them all."""
BRACKETS: Final = 24
"""Of ( and [ in all."""
DIGITS: Final = 60
"""Of one number."""
FUNCTIONS: Final = 10
"""Commands that sympy works on: fractions, roots, sines, unions."""
BARS: Final = 6
"""Which of them open and which close is a riddle that takes the parser exponential time."""
CELLS: Final = 64
"""Of a matrix: ampersands and line ends."""
NUMBER_DEGREE: Final = 3_000
"""Of a power of a number: 2^{2024} is an answer."""
LETTER_DEGREE: Final = 100
GROUP_DEGREE: Final = 30
"""Of a power of a bracket, exponents multiplied along the deepest chain: `((x^2)^3)^4` has degree 24."""
EXPONENTS: Final = 2
"""Within exponents: e^{x^2} has two."""
FACTORIAL_DIGITS: Final = 3
BINOMIAL_DIGITS: Final = 4

_RUN: Final = re.compile(r"\d+")
# A final answer is a value; these are questions.
_QUESTION: Final = re.compile(r"\\(?:sum|prod|i{0,3}int|oint|lim|det|bigcup|bigcap|frac\{d)(?![A-Za-z])")
_FUNCTION: Final = re.compile(
    r"\\(?!(?:left|right|text[a-z]*|math[a-z]*|cdot|times|quad|qquad|pi|theta|alpha|beta|infty|circ|begin|end|pm|in"
    r"|l?dots|displaystyle|le|ge|leq|geq|neq|mid)(?![A-Za-z]))[A-Za-z]+"
)
_FACTORIAL: Final = re.compile(r"(\d*)\s*!")
_GROUP_FACTORIAL: Final = re.compile(r"[)\]}]\s*!")
_TOKEN: Final = re.compile(r"\\[A-Za-z]+|\\.|\d+(?:\.\d+)?|\S")
_OPENING: Final = frozenset("({[")
_CLOSING: Final = frozenset(")}]")


def screened(latex: str) -> str:
    r"""Why an answer is refused; empty where it is not.

    >>> screened(r"\frac{\sqrt{3}}{2}"), screened(r"(x^2+1)^{10}e^{-x^2}")
    ('', '')
    >>> screened("9^{9^9}"), screened("12345!"), screened(r"\sum_{n=1}^{\infty} n")
    ('a power of a power of a number', 'a factorial of 5 digits', '\\sum in a final answer')
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
    return _brackets(latex) or _factorials(latex, longest) or _powers(latex)


def _brackets(latex: str) -> str:
    depth = deepest = opened = 0
    for c in latex:
        opened += c in "(["
        depth = max(0, depth + (c in "([") - (c in ")]"))
        deepest = max(deepest, depth)
    if opened > BRACKETS:
        return f"{opened} brackets"
    return f"brackets {deepest} deep" if deepest > ROUND_DEPTH else ""


def _factorials(latex: str, longest: int) -> str:
    digits = max((len(found[1]) for found in _FACTORIAL.finditer(latex)), default=0)
    if digits > FACTORIAL_DIGITS:
        return f"a factorial of {digits} digits"
    if re.search(r"![\s)}\]]*!", latex):
        return "a factorial of a factorial"
    if _GROUP_FACTORIAL.search(latex) and ("^" in latex or longest > FACTORIAL_DIGITS):
        return "a factorial of a formula of large numbers"
    return "a binomial of large numbers" if "binom" in latex and longest > BINOMIAL_DIGITS else ""


def _powers(latex: str) -> str:
    try:
        _degree(iter(_TOKEN.findall(latex)), exponents=0, brackets=0)
    except _Refused as reason:
        return str(reason)
    return ""


class _Refused(Exception):
    """The reason, from deep within brackets."""


def _degree(tokens: Iterator[str], exponents: int, brackets: int) -> int:
    """The largest degree up to the closing bracket; in an exponent a bound on its value, its numbers multiplied."""
    if brackets > DEPTH or exponents > EXPONENTS:
        raise _Refused(f"exponents {exponents} deep" if exponents > EXPONENTS else f"brackets {brackets} deep")
    largest, atom, before = 1, 1, ""
    for token in tokens:
        if token in _CLOSING:
            break
        if token == "^":
            if exponents and not before.lstrip("\\").isalpha():
                raise _Refused("a power of a power of a number")
            atom *= _exponent(tokens, exponents + 1, brackets)
            if atom > _largest_degree(before):
                raise _Refused(f"a power of degree {atom}")
        elif token in _OPENING:
            atom = _degree(tokens, exponents + (before == r"\exp"), brackets + 1)
        elif token == "!" and exponents:
            raise _Refused("a factorial in an exponent")
        else:
            atom = _size(token) if exponents else 1
        largest = min(largest * atom, 10**9) if exponents else max(largest, atom)
        before = token
    return largest


def _largest_degree(base: str) -> int:
    if base[:1].isdecimal():
        return NUMBER_DEGREE
    return LETTER_DEGREE if base.lstrip("\\").isalpha() else GROUP_DEGREE


def _exponent(tokens: Iterator[str], exponents: int, brackets: int) -> int:
    token = next((token for token in tokens if token not in ("-", "+")), "")
    return _degree(tokens, exponents, brackets + 1) if token in _OPENING else _size(token)


def _size(token: str) -> int:
    """A number's own value, cut to whole; 1 for anything else."""
    return max(1, int(token.split(".")[0])) if token[:1].isdecimal() else 1


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
