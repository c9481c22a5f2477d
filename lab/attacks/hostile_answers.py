r"""Mathematics answers that try to stall or crash a grader, and honest ones to score beside them.

There are four kinds of hostile answers: those that the screen in `offbeat.verify.latex` must refuse; those that respect
every limit on length, depth and size and are still slow in sympy or its parser; those that equal the reference in
disguise, so that comparing values does not settle the question; and long texts around the answer.
"""

import random

REFERENCES = ["5", r"\frac{1}{2}", "x^2 + 1", r"\sqrt{2}", r"(1, 2]", r"\{1, 2\}", "x = 3", r"\sin x"]
"""References of the hostile answers, in turn."""


def _nested(shell: str, core: str, times: int) -> str:
    for _ in range(times):
        core = shell.replace("@", core)
    return core


def _matrix(size: int, cell: str) -> str:
    rows = r" \\ ".join(" & ".join(cell for _ in range(size)) for _ in range(size))
    return rf"\begin{{pmatrix}} {rows} \end{{pmatrix}}"


SCREENED = {
    "tower of nines": "9^{9^{9^{9^{9}}}}",
    "tower without braces": "9^9^9^9^9^9",
    "tower in brackets": "((((9^9)^9)^9)^9)^9",
    "exponent of ten digits": "2^{9999999999}",
    "negative exponent of ten digits": "2^{-9999999999}",
    "exponent in a fraction": r"9^{\frac{9^{9^9}}{1}}",
    "exponent by multiplication": r"7^{999 \cdot 999 \cdot 999}",
    "polynomial to the million": "(x+y+z)^{1000000}",
    "root of a tower": r"\sqrt{9^{9^{9}}}",
    "huge root index": r"\sqrt[99999999]{9^{99999999}}",
    "factorial": "99999999!",
    "factorial tower": "9!!!!!!",
    "factorial of brackets": "((9!)!)!",
    "factorial of a power": "(10^9)!",
    "factorial in an exponent": "2^{99!}",
    "binomial": r"\binom{999999999}{499999999}",
    "infinite sum": r"\sum_{n=1}^{\infty} \frac{1}{n^{n}}",
    "long sum": r"\sum_{n=1}^{100000000} \frac{\sin n}{n}",
    "product": r"\prod_{n=1}^{99999999} (n^2+1)",
    "integral": r"\int_0^1 \sin(\cos(\tan(x^x))) dx",
    "integrals in integrals": _nested(r"\int_0^1 @ dx", "x", 8),
    "limit": r"\lim_{x \to 0} \frac{\sin(\tan x) - \tan(\sin x)}{x^7}",
    "derivatives": r"\frac{d}{dx}" * 20 + r"\tan(x^x)",
    "number of 100,000 digits": "7" * 100_000,
    "number of 4,000 digits": "7" * 4_000,
    "decimals": "0." + "3" * 5_000,
    "100,000 brackets": "(" * 50_000 + "1" + ")" * 50_000,
    "100,000 braces": "{" * 50_000 + "1" + "}" * 50_000,
    "braces that never close": r"\frac{" * 20_000,
    "nested fractions": _nested(r"\frac{1}{1+@}", "1", 300),
    "nested roots": _nested(r"\sqrt{1+@}", "2", 300),
    "nested text": _nested(r"\text{@}", "5", 500),
    "sum of 20,000 terms": "+".join(f"x_{{{n}}}" for n in range(20_000)),
    "product of 5,000 factors": "".join(f"(x+{n})" for n in range(5_000)),
    "set of 20,000": r"\{" + ",".join(map(str, range(20_000))) + r"\}",
    "matrix of 100 by 100": _matrix(100, "1"),
    "matrix of 9 by 9 unknowns": _matrix(9, "x"),
    "determinant": rf"\det {_matrix(8, 'a+b')}",
    "100,000 spaces": " " * 100_000,
    "100,000 backslashes": "\\" * 100_000,
    "100,000 dollars": "$" * 100_000,
    "100,000 equals": "=" * 100_000,
    "100,000 minuses": "-" * 100_000 + "5",
    "100,000 carets": "^" * 100_000,
    "emoji": "🧮" * 30_000,
    "combining accents": "5" + "\u0301" * 30_000,
    "right-to-left overrides": "\u202e" * 30_000 + "5",
    "zero-width joiners": "5\u200d" * 30_000,
    "tower of exponentials": r"\exp(\exp(\exp(79)))",
    "sines within sines within sines": _nested(r"\sin(@)", "x", 10),
    "logarithms of logarithms of logarithms": _nested(r"\ln(@)", "x", 10),
    "ambiguous brackets": "a(b(c(d(e(f(g(h(x" + ")" * 8,
    "ambiguous bars": "|x|y|z|" * 12,
    "forty intervals": r" \cup ".join(f"({n}, {n + 1}]" for n in range(0, 80, 2)),
    "polynomial of degree 1999": "(x+1)^{1999}",
    "superscripts": "9⁹⁹⁹⁹⁹⁹⁹⁹",
    "mathematical alphabet": "𝟗^{𝟗^{𝟗^{𝟗}}}",
    "null characters": "5\x00" * 10_000,
    "Python": "__import__('os').system('sleep 60')",
    "Python in text": r"\text{().__class__.__bases__[0].__subclasses__()}",
}
PAST_THE_SCREEN = {
    "powers of a number": "7^{2999} + 11^{2999} - 13^{2998}",
    "power of a power": "((7^{3})^{3})^{3}",
    "polynomial of degree 30": "(x+1)^{30}",
    "product of high powers": "(x+1)^{29}(x+2)^{29}(x-3)^{29}",
    "three unknowns": "(x+y+z)^{30}-(x-y-z)^{30}",
    "factorials divided": r"\frac{999! \cdot 998!}{997! \cdot 996!}",
    "roots within roots": _nested(r"\sqrt{2+@}", r"\sqrt{3}", 5),
    "cube roots within cube roots": _nested(r"\sqrt[3]{2+\sqrt{5}+@}", r"\sqrt{7}", 3),
    "sum of ten roots": "+".join(rf"\sqrt{{{p}}}" for p in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29)),
    "power of a sum of roots": r"(\sqrt2+\sqrt3+\sqrt5+\sqrt7+\sqrt{11})^{30}",
    "sines within sines": r"\sin(\cos(\tan(\sin(x))))",
    "sum of tangents": "+".join(rf"\tan({n}x)" for n in range(1, 10)),
    "product of cosines": "".join(rf"\cos({n}x)" for n in range(1, 10)),
    "sine of a huge angle": r"\sin(10^{2999})",
    "tangents to the hundredth": r"\tan^{100}(x) - \cot^{100}(x)",
    "exponential of an exponential": "e^{e^{79}}",
    "exponentials by name": r"\exp(\exp(79))",
    "exponential to the hundredth": r"e^{99x} + e^{98y} - e^{97x+y}",
    "logarithms within logarithms": r"\ln(\ln(\ln(\ln(x))))",
    "continued fraction": _nested(r"\frac{1}{x+@}", "y", 5),
    "rational functions": "+".join(rf"\frac{{x+{n}}}{{x^{n}+y}}" for n in range(1, 10)),
    "equation of degree 17": "x^{17}+x^{5}+3x+1=0",
    "equation of degree 99": r"x^{99}-x^{50}+\sin x=0",
    "system in one line": "x^5+y^5=3, x^4-y^3=1, xy+x^2=7",
    "inequalities": r"x^{9}-x^{5}+1 < \sin x < x^{7}",
    "unions": r" \cup ".join(f"({n}, {n + 1}]" for n in range(0, 20, 2)),
    "matrix of unknowns": _matrix(3, r"x^{9}+y"),
    "power of a matrix": _matrix(3, "x+y") + "^{30}",
    "complex power": "(1+2i)^{30}(3-i)^{30}",
    "plus or minus, often": r"\pm ".join("12345678"),
    "absolute values": _nested(r"|@-1|", "x", 3),
    "floors": _nested(r"\lfloor @+\frac12 \rfloor", r"\pi", 3),
    "long factors": str(10**29 + 319) + r"\cdot " + str(10**28 + 331),
    "root of a product of primes": rf"\sqrt{{{(10**29 + 319) * (10**28 + 331)}}}",
    "ambiguous grammar": "a(b(c(d(x))))" * 5,
    "bars": "|x|y|z|x|y|",
    "letters": "abcdefghijklmnopqrstuvwxyz" * 18,
    "commas": ",".join("x" * 240),
    "unknown to an unknown": "x^{y^{2}}y^{x^{2}}(x+y)^{x+y}",
}
EQUAL_IN_DISGUISE = {
    "a zero of sines": (r"5+(\sin^2 x+\cos^2 x-1)(x+y+z)^{30}", "5"),
    "a zero of roots": (r"\sqrt{2}+(\sqrt{5+2\sqrt{6}}-\sqrt2-\sqrt3)(\sqrt{7}+x)^{30}", r"\sqrt{2}"),
    "a zero of powers": (r"x^2+1+((x+y)^{30}-(x^2+2xy+y^2)^{15})(x+z)^{30}", "x^2 + 1"),
    "tangents that cancel": (r"\tan(3x)-\frac{3\tan x-\tan^3 x}{1-3\tan^2 x}+\sin x", r"\sin x"),
    "a triple angle": (r"\sin x + (\cos(9x)-\cos(8x)\cos(x)+\sin(8x)\sin(x))(x+1)^{30}", r"\sin x"),
    "logarithms that cancel": (r"(\ln(x^{9}y^{9})-9\ln x-9\ln y)(x+y)^{30}+5", "5"),
    "an equation multiplied": ("(x-3)(x^{10}+y^{2}+1)^{3}=0", "x = 3"),
    "a polynomial equation": (r"x^{40}-3x^{39}+x\sin x-3\sin x=0", "x^{40}-3x^{39}=0"),
    "an inequality": (r"x^{30}-x^{17}+x<\sqrt{x}+1", r"x^{30}-x^{17}<\sqrt{x}"),
    "a matrix": (_matrix(2, r"x^{9}+\sin^2 y+\cos^2 y-1"), _matrix(2, "x^{9}")),
}
"""(answer, reference): equal or nearly equal at every point, so that sympy must search for a proof."""
LONG_TEXTS = {
    "unboxed, 100,000 characters": "The answer is " + "9^" * 50_000,
    "20,000 boxes": r"\boxed{1}" * 20_000,
    "20,000 open boxes": r"\boxed{" * 20_000,
    "20,000 different boxes": "".join(rf"\boxed{{{n}}}" for n in range(20_000)),
    "20,000 answers": "The answer is 5. " * 20_000,
    "20,000 tags": "<answer>" * 20_000 + "5" + "</answer>" * 20_000,
    "100,000 hashes": "#" * 100_000,
}


def hostile() -> list[tuple[str, str, str]]:
    """Return (name, completion, reference) of all kinds."""
    answers = list((SCREENED | PAST_THE_SCREEN).items())
    pairs = [(name, answer, REFERENCES[n % len(REFERENCES)]) for n, (name, answer) in enumerate(answers)]
    pairs += [(name, answer, reference) for name, (answer, reference) in EQUAL_IN_DISGUISE.items()]
    found = [(name, rf"So the final answer is $\boxed{{{answer}}}$.", reference) for name, answer, reference in pairs]
    return found + [(name, text, r"\frac{1}{2}") for name, text in LONG_TEXTS.items()]


def honest(count: int, seed: int = 0) -> list[tuple[str, str, bool]]:
    """Return (completion, reference, whether it is right) as an honest model writes them: numbers and formulas."""
    rng = random.Random(seed)
    return [_honest(rng) for _ in range(count)]


def _honest(rng: random.Random) -> tuple[str, str, bool]:
    a, b, c, kind = rng.randrange(2, 90), rng.randrange(2, 90), rng.randrange(2, 9), rng.randrange(11)
    right = rng.random() < 0.5
    reference, _ = _pairs(a, b, c)[kind]
    _, answer = _pairs(a if right else a + 1, b, c)[kind]
    return rf"After some algebra the terms cancel, so the final answer is $\boxed{{{answer}}}$.", reference, right


def _pairs(a: int, b: int, c: int) -> list[tuple[str, str]]:
    """Return values as a dataset writes them, and as a model may write them."""
    return [
        (rf"\frac{{{a}}}{{{b}}}", rf"\frac{{{c * a}}}{{{c * b}}}"),
        (rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{b}}} \cdot {a}"),
        (rf"x^2 - {a * a}", rf"(x-{a})(x+{a})"),
        (rf"({a}, {90 + b}]", rf"\left({a}, {90 + b}\right]"),
        (rf"\{{{a}, {90 + b}\}}", rf"\{{{90 + b}, {a}\}}"),
        (rf"x = {a}", str(a)),
        (rf"\frac{{{a}\pi}}{{{b}}}", rf"{a}\pi/{b}"),
        (rf"{a}x + {b}", rf"{b} + {a}x"),
        (rf"{c}^{{{a}}}", rf"{c}^{{{a - 1}}} \cdot {c}"),
        (str(a * b), f"{a * b}.0"),
        (rf"\begin{{pmatrix}} {a} \\ {b} \end{{pmatrix}}", rf"\begin{{pmatrix}}{a}\\{b}\end{{pmatrix}}"),
    ]
