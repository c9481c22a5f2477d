"""How models write a number at the end of a GSM8K solution, and how a wrong number differs from the right one.

Used by `python -m lab.bench.verify gsm8k`, by the tests and for a table in the docs (`lab/site/reference.py`).
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal


@dataclass(frozen=True)
class Spelling:
    """One way to end a completion."""

    name: str
    write: Callable[[Decimal], str]


def money(value: Decimal) -> str:
    """Format an amount as people write it: -$1,234.50."""
    return f"{'-' if value < 0 else ''}${abs(value):,.2f}"


def _cents(value: Decimal) -> str:
    return money(value).replace("$", r"\$")


SPELLINGS = [
    Spelling("GSM8K's own mark", lambda n: f"9 - 3 = <<9-3=6>>6 eggs are left.\n#### {n}"),
    Spelling("the mark, with separators", lambda n: f"So that is all.\n#### {n:,}"),
    Spelling("the mark, in dollars", lambda n: f"So that is all.\n#### {money(n)}"),
    Spelling("boxed, in a sentence", lambda n: rf"Therefore, the final answer is $\boxed{{{n}}}$."),
    Spelling("boxed, LaTeX separators", lambda n: rf"\[ \boxed{{{f'{n:,}'.replace(',', '{,}')}}} \]"),
    Spelling("boxed dollars and cents", lambda n: rf"She earns $\boxed{{{_cents(n)}}}$ a day."),
    Spelling("boxed, with a unit", lambda n: rf"\boxed{{{n}\text{{ dollars}}}}"),
    Spelling("boxed percentage", lambda n: rf"\boxed{{{n}\%}}"),
    Spelling("boxed assignment", lambda n: rf"\boxed{{x = {n}}}"),
    Spelling("a sentence", lambda n: f"The answer is {n}."),
    Spelling("a sentence, bold", lambda n: f"So the final answer is **{n:,}** eggs."),
    Spelling("a sentence, in dollars", lambda n: f"The answer is {money(n)}."),
    Spelling("a heading", lambda n: f"**Answer:** {n}"),
    Spelling("a heading, on the next line", lambda n: f"### Final Answer:\n\n{n:,} miles"),
    Spelling("tags, after thinking", lambda n: f"<think>9 or 10, so 8?</think>\n<answer> {n} </answer>"),
    Spelling("last line, bare", lambda n: f"3 + 4 = 7\n{n}"),
    Spelling("last line, bold", lambda n: f"3 + 4 = 7\n\n**{n:,}**"),
    Spelling("last line, unit", lambda n: f"3 + 4 = 7\n{n} dollars"),
    Spelling("last line, a sentence", lambda n: f"3 + 4 = 7\nJanet makes {money(n)} every day at the market."),
    Spelling("last line, an equation", lambda n: f"So she makes 9 * 2 = {n} dollars."),
    Spelling("last line, inline math", lambda n: "3 + 4 = 7\n" + rf"Hence she makes \({n}\) dollars."),
    Spelling("last line, decimal point", lambda n: f"Total: {n:.1f}"),
    Spelling("scientific", lambda n: f"Answer: {n:e}"),
    Spelling("typeset minus and thin spaces", lambda n: f"Answer: {n:,}".replace("-", "−").replace(",", "\u202f")),
]


def _swapped(n: Decimal, rng: random.Random) -> Decimal | None:
    digits = list(str(abs(n)))
    places = [i for i in range(len(digits) - 1) if digits[i] != digits[i + 1]]
    if not places:
        return None
    i = rng.choice(places)
    digits[i], digits[i + 1] = digits[i + 1], digits[i]
    return Decimal("".join(digits)).copy_sign(n)


def _one_digit(n: Decimal, rng: random.Random) -> Decimal:
    digits = list(str(abs(n)))
    i = rng.randrange(len(digits))
    digits[i] = rng.choice([d for d in "0123456789" if d != digits[i]])
    return Decimal("".join(digits)).copy_sign(n)


ALTERATIONS: dict[str, Callable[[Decimal, random.Random], Decimal | None]] = {
    "one more": lambda n, _: n + 1,
    "one less": lambda n, _: n - 1,
    "a half more": lambda n, _: n + Decimal("0.5"),
    "sign flipped": lambda n, _: -n,
    "two digits swapped": _swapped,
    "one digit changed": _one_digit,
    "a digit appended": lambda n, rng: n * 10 + rng.randrange(10),
    "the last digit dropped": lambda n, _: Decimal(str(n)[:-1]) if abs(n) >= 10 else None,
    "decimal point shifted left": lambda n, _: n / 10,
    "decimal point shifted right": lambda n, _: n * 10,
    "hundredfold": lambda n, _: n * 100,
    "doubled": lambda n, _: n * 2,
}


def altered(answers: list[Decimal], at: int, rng: random.Random) -> dict[str, Decimal]:
    """Return wrong values for one problem, by what is wrong with them. One is the answer of another problem."""
    right = answers[at]
    found = {name: alter(right, rng) for name, alter in ALTERATIONS.items()}
    found["another problem's answer"] = answers[rng.randrange(len(answers))]
    return {name: value for name, value in found.items() if value is not None and value != right}
