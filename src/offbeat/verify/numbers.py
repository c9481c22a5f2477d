r"""Read one number, in any of the spellings that people and models use, as an exact fraction.

`quantity` reads a short text with exactly one number and otherwise only words, units and markup (`$…$`, `**…**`,
`\text{…}`). With anything else the text is not a number: a second number, an operator, a root, a power, an unknown
suffix. Nothing is evaluated, and numbers have at most 40 digits, so the work is bounded.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from offbeat.verify.extract import denies

LONGEST: Final = 300
"""Characters; a longer answer is not a number."""
_DIGITS: Final = 40
_SCALES: Final = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SUFFIXES: Final = {"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "bn": 10**9}
_UNITS: Final = {
    spelling: names.split()[0]
    for names in (
        "dollar usd buck", "cent", "euro eur", "pound gbp lb lbs", "rupee rs inr", "yen jpy",
        "km kilometer kilometre", "m meter metre", "cm centimeter centimetre", "mm millimeter millimetre",
        "mile mi", "foot feet ft", "inch inches in", "yard yd", "kg kilogram kilo", "g gram", "mg milligram",
        "ounce oz", "ton tonne", "second sec s", "minute min", "hour hr h", "day", "week", "month", "year yr",
        "liter litre l", "ml milliliter millilitre", "gallon gal", "degree deg", "mph", "kmh", "am", "pm",
    )
    for spelling in names.split()
}  # fmt: skip
_CURRENCIES: Final = {"$": "dollar", "€": "euro", "£": "pound", "¥": "yen", "₹": "rupee", "¢": "cent"}

_MINUSES: Final = str.maketrans(dict.fromkeys("−‐‑﹣－", "-"))
_VULGAR: Final = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅛": "1/8"}
# Markup to remove, in this order. All patterns are linear and run on at most LONGEST characters.
_MARKUP: Final = [
    (re.compile(pattern), plain)
    for pattern, plain in [
        (r"(?<!\d)–(?=[\d$€£¥₹.])", "-"),
        (r"\\([$%#])", r"\1"),
        (r"\\[dtc]?frac\s*(?:\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d)\s*(\d))", r" \1\3/\2\4"),
        (r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}\\]*)\}", r" \1"),
        (r"\\(?:left|right|displaystyle|!)(?![A-Za-z])|\*\*|__|`", ""),
        (r"\{,\}|(?<=\d)(?:\\[,;: ]|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))", ","),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|°", " degree "),
        (r"\\(?:times|cdot)(?![A-Za-z])", "×"),
        (r"\\(?:approx|sim|q?quad)(?![A-Za-z])|[≈~]|(?<=[A-Za-z])!|\\[,;: ()\[\]]", " "),
        (r"(?<=\d)\s*[×x*·]\s*10\s*\^\s*(?:\{\s*(-?\d+)\s*\}|(-?\d+))", r"e\1\2"),
        (r"(?i)\s*\b(?:percent|per cent)\b", "%"),
        (r"(?i)\b(?:minus|negative)\s+(?=[$€£¥₹]?[\d.])", "-"),
    ]
]  # fmt: skip
_NUMBER: Final = re.compile(
    r"(?P<minus>(?<![\w)])-\s*)?\+?"
    r"(?:(?:(?P<whole>\d+)\s+)?(?P<numerator>\d+)\s?/\s?(?P<denominator>\d+)"
    r"|(?P<decimal>\d[\d,.]*|\.\d+)(?:[eE](?P<exponent>[-+]?\d{1,3}))?)"
    r"(?P<percent>\s*%)?(?P<gap>\s*)(?P<word>[A-Za-z]*)"
)
_DECIMAL: Final = re.compile(r"(?:\d+|\d{1,3}(?:,\d{3})+)?(?:\.\d+)?")
_OPERATORS: Final = frozenset("\\^_{}<>|!√∛πↀ∞±≠≤≥*×÷·+?²³¹⁰⁴⁵⁶⁷⁸⁹ⁿ=&#")
_VARIABLE: Final = re.compile(r"(?<![\w.'’])[B-HJ-Zb-hj-z](?![\w.'’])")
_BEFORE: Final = re.compile(r"\b(?:than|over|under|above|below|between|times)\s*$", re.IGNORECASE)
_AROUND: Final = re.compile(
    r"\b(?:or|half|quarter|third|twice|thrice|double|triple|squared|cubed|root|log|plus|minus|\w*(?:dred|sand|ion|en)ths?)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Quantity:
    """A number, with its unit if that is known.

    >>> quantity("about $1,234.50")
    Quantity(value=Fraction(2469, 2), percent=False, unit='dollar')
    """

    value: Fraction
    percent: bool = False
    unit: str = ""


def quantity(text: str) -> Quantity | None:
    r"""Return the one number in a text, or None.

    In a chain of equations the last part counts; no other part may be a different number.

    >>> for spelling in ["**18**", r"\$18.00", "9 * 2 = 18 dollars", r"$\frac{36}{2}$", "1.8 × 10^1"]:
    ...     assert quantity(spelling).value == 18
    >>> for spelling in ["17 or 18", "9 * 2", r"\sqrt{18}", "not 18", "18x", "17 = 18", "18,00", "more than 18"]:
    ...     assert quantity(spelling) is None
    """
    if len(text) > LONGEST or denies(text):
        return None
    parts = _without_markup(text).split("=")
    if any(part.endswith(("<", ">", "!")) for part in parts[:-1]):
        return None
    found = [_read_number(part) for part in parts]
    last = found[-1]
    if last is None or any(one is not None and one.value != last.value for one in found):
        return None
    return last


def _without_markup(text: str) -> str:
    text = text.translate(_MINUSES)
    for sign, plain in _VULGAR.items():
        text = text.replace(sign, f" {plain}")
    for pattern, plain in _MARKUP:
        text = pattern.sub(plain, text)
    return text


def _read_number(text: str) -> Quantity | None:
    """Return the one number in a text without markup and equations, or None."""
    currency = next((name for sign, name in _CURRENCIES.items() if text.count(sign) % 2), "")
    text = re.sub(r"(?<=[A-Za-z])[$€£¥₹¢]", " ", text)
    text = re.sub(r"[$€£¥₹]\s*|¢", "", text).strip(" \t*_\"'")
    match = _NUMBER.search(text)
    if match is None:
        return None
    value = None if _is_part_of_more(text, match) else _value(match)
    scaled = None if value is None else _scaled(value, attached=not match["gap"], word=match["word"])
    if scaled is None:
        return None
    value, unit = scaled
    return Quantity(-value if match["minus"] else value, bool(match["percent"]), unit or currency)


def _is_part_of_more(text: str, match: re.Match[str]) -> bool:
    """Return True if the text around a number changes it: '18 - x', '18 y', '√ 18', '17 and 18', 'more than 18'."""
    before, after = text[: match.start()], text[match.end() :]
    if before.rstrip().endswith("-") or after.lstrip().startswith("-"):
        return True
    if before[-1:].isalnum() or _BEFORE.search(before):
        return True
    if _VARIABLE.match(text, match.start("word")) and match["word"].lower() not in _UNITS:
        return True
    rest = f"{before} {after}"
    if any(c.isnumeric() or c in _OPERATORS for c in rest):
        return True
    return any(pattern.search(rest) for pattern in (_VARIABLE, _AROUND)) or _AROUND.fullmatch(match["word"]) is not None


def _value(match: re.Match[str]) -> Fraction | None:
    """Return the number without sign, scale and unit."""
    if len(match[0]) > _DIGITS:
        return None
    if match["denominator"]:
        whole, numerator, denominator = (int(match[part] or 0) for part in ("whole", "numerator", "denominator"))
        return whole + Fraction(numerator, denominator) if denominator else None
    written = match["decimal"].rstrip(".,")
    if not _DECIMAL.fullmatch(written):
        return None
    exponent = int(match["exponent"] or 0)
    return Fraction(written.replace(",", "")) * Fraction(10) ** exponent if abs(exponent) <= _DIGITS else None


def _scaled(value: Fraction, *, attached: bool, word: str) -> tuple[Fraction, str] | None:
    """Apply a scale such as 'thousand' or 'k', and return the unit; None for an unknown suffix, as in '5x' or '3D'."""
    if attached and word in _SUFFIXES:
        return value * _SUFFIXES[word], ""
    word = word.lower()
    if word in _SCALES:
        return value * _SCALES[word], ""
    unit = _UNITS.get(word) or _UNITS.get(word.removesuffix("s"), "")
    return None if attached and word and not unit else (value, unit)
