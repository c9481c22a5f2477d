"""A calculator between generations: the example of an environment with a tool. It parses; it never evaluates code.

The policy writes `<calc>17*25</calc>` and reads `<result>425</result>`; without a call the episode is over.
"""

import re
from fractions import Fraction
from typing import Final

_CALL: Final = re.compile(r"<calc>([^<]*)</calc>\s*$")
_TOKEN: Final = re.compile(r"\s*(?:(\d+(?:\.\d+)?)|([-+*/()]))")
_LONGEST: Final = 200
_LARGEST: Final = 10**60


class CalculatorError(ValueError):
    """What was asked for cannot be calculated: said to the policy in words."""


def calculate(text: str) -> Fraction:
    """Sums of whole and decimal numbers with + - * / and brackets, exactly.

    >>> str(calculate("2*(3+4) - 1/2"))
    '27/2'
    """
    if len(text) > _LONGEST:
        raise CalculatorError(f"too long: {len(text)} characters, at most {_LONGEST}")
    tokens: list[str] = []
    at = 0
    while text[at:].strip():
        found = _TOKEN.match(text, at)
        if found is None:
            raise CalculatorError(f"cannot read {text[at:].strip()[:20]!r}")
        tokens.append(found[1] or found[2])
        at = found.end()
    value, rest = _sum(tokens)
    if rest:
        raise CalculatorError(f"cannot read {' '.join(rest)[:20]!r}")
    return value


def _sum(tokens: list[str]) -> tuple[Fraction, list[str]]:
    """The value of a sum at the beginning, and what follows it."""
    value, rest = _product(tokens)
    while rest and rest[0] in "+-":
        right, after = _product(rest[1:])
        value, rest = (value + right if rest[0] == "+" else value - right), after
    return value, rest


def _product(tokens: list[str]) -> tuple[Fraction, list[str]]:
    value, rest = _term(tokens)
    while rest and rest[0] in "*/":
        right, after = _term(rest[1:])
        if rest[0] == "/" and right == 0:
            raise CalculatorError("division by zero")
        value, rest = (value * right if rest[0] == "*" else value / right), after
        if max(abs(value.numerator), value.denominator) > _LARGEST:
            raise CalculatorError("the result is too large")
    return value, rest


def _term(tokens: list[str]) -> tuple[Fraction, list[str]]:
    match tokens:
        case ["-", *rest]:
            value, rest = _term(rest)
            return -value, rest
        case ["(", *rest]:
            value, rest = _sum(rest)
            if not rest or rest[0] != ")":
                raise CalculatorError("a bracket is not closed")
            return value, rest[1:]
        case [number, *rest] if number[0].isdigit():
            return Fraction(number), rest
    raise CalculatorError("a number is missing")


class Calculator:
    """The environment.

    >>> calculator = Calculator()
    >>> calculator.reply("17 times 25 is <calc>17*25</calc>")
    '<result>425</result>'
    >>> calculator.reply("The answer is 425.") is None
    True
    """

    def reply(self, text: str) -> str | None:
        """The result of a call that ends the text; None where there is none."""
        call = _CALL.search(text)
        if call is None:
            return None
        try:
            return f"<result>{calculate(call[1])}</result>"
        except CalculatorError as error:
            return f"<error>{error}</error>"
