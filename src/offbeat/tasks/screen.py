r"""Which LaTeX answers are not handed to sympy, where a few characters can cost hours.

The limits are far beyond what a person writes as a final answer. An answer over them is not in the form asked for, and
is wrong; the reason is a phrase for people. One pass each over at most `CHARACTERS` characters.
"""

import re
from collections.abc import Iterator
from typing import Final

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
