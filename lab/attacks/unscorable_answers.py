r"""Answers made to be unscorable: they hold a verifier or an extractor, make it raise, or kill its process.

`KNOWN` was found by hand and by `search`, which nests hostile formulas and repeats pieces of marks. Each kind of answer
goes to a grader of its own: those of offbeat's tasks, and reward functions as people write them, which fail alike.
"""

import ast
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction

from lab.attacks import hostile_answers
from offbeat.tasks.gsm8k import correct as gsm8k_correct
from offbeat.tasks.python_code import passes
from offbeat.types import Json
from offbeat.verify import choice, exact

PROGRAM_SECONDS = 1.0
_TESTS: list[Json] = [{"call": "odd", "args": [1], "result": True}, {"call": "odd", "args": [2], "result": False}]
COLUMNS: Mapping[str, Mapping[str, Json]] = {
    "math": {"answer": "5"},
    "number": {"answer": "18"},
    "exact": {"answer": "New York"},
    "choice": {"answer": "B"},
    "code": {"tests": _TESTS},
    "own": {"answer": "18"},
}
CONTROLS = {
    "math": r"\boxed{4}",
    "number": "#### 17",
    "exact": "Boston",
    "choice": "A",
    "code": "```python\ndef odd(n): return False\n```",
    "own": "7",
}
"""An ordinary wrong answer of each kind, which is scored first."""


def number(text: str, columns: Mapping[str, Json]) -> float:
    return gsm8k_correct(text, columns)


def exactly(text: str, columns: Mapping[str, Json]) -> float:
    return float(exact(text, str(columns["answer"])))


def chosen(text: str, columns: Mapping[str, Json]) -> float:
    return float(choice(text, str(columns["answer"])))


def code(text: str, columns: Mapping[str, Json]) -> float:
    return passes(text, columns, seconds=PROGRAM_SECONDS)


def own(text: str, columns: Mapping[str, Json]) -> float:
    """A reward function as people write it: the first word says which of its habits the text meets."""
    habit, _, rest = text.partition(" ")
    readers: dict[str, Callable[[], object]] = {
        "int": lambda: int(rest),
        "float": lambda: float(rest),
        "fraction": lambda: Fraction(rest),
        "decimal": lambda: Decimal(rest) ** 9_999_999,
        "json": lambda: json.loads(rest)["answer"],
        "literal": lambda: ast.literal_eval(rest),
        "after": lambda: rest.split("####")[1],
        "words": lambda: re.fullmatch(r"(\w+\s?)*\.", rest),
        "digits": lambda: re.search(r"(\d+)*\$", rest),
        "power": lambda: str(7 ** int(rest)),
        "list": lambda: [0] * int(rest),
        "repeat": lambda: "ab" * int(rest),
        "share": lambda: 1 / int(rest),
        "score": lambda: rest,
    }
    if habit not in readers:
        return float(text == columns["answer"])
    value = readers[habit]()
    return float(rest) if habit in ("float", "score") else float(str(value) == columns["answer"])


GRADERS = {"number": number, "exact": exactly, "choice": chosen, "code": code, "own": own}
"""The reward functions by kind; `math` is the task of that name."""


def _fenced(program: str) -> str:
    return f"```python\n{program}\n```"


_SPACES = " " * 199_000
KNOWN: dict[str, list[str]] = {
    "math": [
        rf"\boxed{{{formula}}}"
        for formula in (
            "(x+y+z+w+1.5)^{30}",
            r"\{(x+y+z+w+1.5)^{30}, 1\}",
            "((x+y+z+w+1.5)^{30}, 2)",
            "(x+y+z+w+1.5)^{30}=0",
            "(x+y+z+w+1.5)^{30}<5",
            "5+0.0(x+y+z+w+1.5)^{30}",
            r"(\sqrt2+\sqrt3+\sqrt5+\sqrt7+\sqrt{11}+0.5)^{30}",
            "(1.5x+2.5y+3.5z)^{30}-(1.5x+2.5y+3.5z)^{29}",
            r"\sin(1.5x)^{30}+\cos(1.5x)^{30}",
            r"\frac{(x+y+z+1.5)^{30}}{(x-y-z-1.5)^{30}}",
            r"\sqrt{(x+y+z+w+1.5)^{30}}",
            r"|(x+y+z+w+1.5)^{30}|",
            "e^{(x+y+z+w+1.5)^{30}}",
        )
    ]
    + [text for _, text, _ in hostile_answers.hostile() if len(text) < 1_000],
    "number": [
        "#### " + "1" * 5_000,
        "#### " + "1/" * 4_000,
        "#### " + "1," * 4_000,
        "#### 1e" + "9" * 300,
        "#### " + "٣" * 299,
        "#### ½" * 1_300,
        "The answer is " + "(" * 7_900,
        "answer" * 1_300,
        "####" + " " * 7_900 + "x",
        r"\boxed{" * 1_100 + "18" + "}" * 1_100,
        "<answer>" * 1_000,
        "18" + "\u0301" * 7_900,
    ],
    "exact": [
        r"\text{" * 1_600,
        r"\text" + " " * 7_900 + "{",
        "the answer is " * 570,
        "answer (" * 1_000,
        "*" * 8_000,
        "answer to " + "a " * 3_900,
    ],
    "choice": ["(B" * 4_000, "B or " * 1_600, "Answer: B" + ")" * 7_900, "option " * 1_100, "(" * 8_000],
    "code": [
        "```" + _SPACES,
        "```python\n" + _SPACES + "\n" + _SPACES,
        "```python" * 20_000,
        ("```" + " " * 99 + "\n") * 1_900,
        _fenced("while True: pass"),
        _fenced("import time; time.sleep(60)"),
        _fenced("x = []\nwhile True: x.append(bytearray(1 << 20))"),
        _fenced("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"),
        _fenced("import signal, os\nos.kill(os.getpid(), signal.SIGKILL)"),
        _fenced("import os\nos.kill(1, 9); os.kill(-1, 9)"),
        _fenced("import os\nos.write(1, b'[' * 900_000 + b'\\n')"),
        _fenced("def odd(n): return 10 ** 300_000"),
        _fenced("def odd(n):\n    x = []\n    for _ in range(10 ** 6): x = [x]\n    return x"),
        _fenced("import ctypes; ctypes.string_at(0)"),
        _fenced("(" * 100_000),
        _fenced("import os\nwhile True: os.write(1, b'x')"),
    ],
    "own": [
        "int forty-two",
        "int " + "9" * 5_000,
        "float nan",
        "float inf",
        "fraction 1/0",
        "fraction 1e999999999",
        "decimal 1.0000001",
        "json {}",
        "json " + "[" * 100_000,
        "json 7",
        "literal " + "(" * 300,
        "literal " + "-" * 100_000 + "1",
        "after 18",
        "words " + "a" * 40,
        "digits " + "1" * 40,
        "power 99999999",
        "list 99999999999",
        "repeat 99999999999",
        "share 0",
        "score 1e400",
        "score -1e400",
    ],
}
_FORMULAS = [*hostile_answers.PAST_THE_SCREEN.values(), "(x+y+z+w+1.5)^{30}", r"\frac{1}{2}", "1.5", "x", "5"]
_SHELLS = [
    "@+@",
    "@-@",
    "@@",
    "(@)^{@}",
    r"\frac{@}{@}",
    r"\sqrt{@}",
    "@=@",
    "@,@",
    r"\{@, @\}",
    "|@|",
    "0.5@",
    r"\sin(@)",
]
_BITS = [
    "####",
    "answer",
    " ",
    "is ",
    "(",
    "{",
    r"\text{",
    r"\boxed{",
    "<answer>",
    "1",
    ",",
    "/",
    "e",
    "-",
    "½",
    "B",
    "\n",
    "```",
]


def search(count: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """Yield (kind, text): formulas nested in one another, and pieces of marks repeated in runs of any length."""
    rng = random.Random(seed)
    for at in range(count):
        if at % 2 == 0:
            yield "math", rf"\boxed{{{_formula(rng, rng.randrange(3))}}}"
        else:
            pieces = [rng.choice(_BITS) * int(10 ** rng.uniform(0, 3.3)) for _ in range(rng.randrange(1, 5))]
            yield rng.choice(["number", "exact", "choice", "code"]), "".join(pieces)


def _formula(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return rng.choice(_FORMULAS)
    return re.sub("@", lambda _: _formula(rng, depth - 1), rng.choice(_SHELLS))
