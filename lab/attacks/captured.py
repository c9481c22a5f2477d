"""A reward captured from a session is the one that was given, or it is refused.

    python -m lab.attacks.captured           500 mutated rewards and the same forms unchanged: row trust.5; 6 minutes;
                                             continues after `lab/attacks/captured.jsonl`
    python -m lab.attacks.captured --short   30 of them; records nothing

Each case is a script that defines a reward in one of twenty forms, then changes something that its source does not say:
defaults, attributes, closures, globals, classes, libraries, or the file itself. The script writes the task file and
scores rows that the capture does not see. A new process loads the task file and scores them, too.
"""

import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lab.figures import ROOT, Figure, command_parser, machine, report

RESULTS: Final = ROOT / "lab" / "attacks" / "captured.jsonl"
CASES: Final = 500
HEAD: Final = """
import asyncio, builtins, datetime, enum, functools, math, pathlib, random, re, sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

LIMIT = 5
WORDS = ["alpha", "beta"]
TABLE = {"a": 1.0, "b": 2.0}
PATTERN = re.compile("[aeiou]")
count = 0

def size(text):
    return len(text.strip())

def value(text, shift, bonus=0.125):
    found = min(size(text), LIMIT) + bonus + math.floor(shift) + abs(shift) + sum(word in text for word in WORDS)
    return found + TABLE.get(text[:1], 0.0) + len(PATTERN.findall(text))
"""
HELPER: Final = """
import math
LIMIT = 5
WORDS = ["alpha", "beta"]

def size(text):
    return len(text.strip())

class Grader:
    weight = 2.0
    def __call__(self, text, columns):
        return self.weight * min(size(text), LIMIT) + 0.125

def reward(text, columns, bonus=0.125):
    return min(size(text), LIMIT) + bonus + math.floor(columns["shift"]) + sum(word in text for word in WORDS)
"""
FORMS: Final[dict[str, str]] = {
    "function": "def reward(text, columns):\n    return value(text, columns['shift']) + 0.25\n",
    "default": "def reward(text, columns, k=3):\n    return k * value(text, columns['shift'])\n",
    "keyword default": "def reward(text, columns, *, k=3, seen=[]):\n    return k * value(text, 1.5) + len(seen)\n",
    "computed default": "def reward(text, columns, k=LIMIT + 1):\n    return k * value(text, columns['shift'])\n",
    "closure": """
def make(k, words):
    def reward(text, columns):
        return k * value(text, columns['shift']) + sum(word in text for word in words)
    return reward
reward = make(3, ["gamma"])
""",
    "nonlocal": """
def make():
    calls = 0
    def reward(text, columns):
        nonlocal calls
        calls += 1
        return value(text, columns['shift']) + calls
    return reward
reward = make()
""",
    "global counter": """
def reward(text, columns):
    global count
    count += 1
    return value(text, columns['shift']) + count
""",
    "lambda": "reward = lambda text, columns: value(text, columns['shift']) + 0.25\n",
    "lambda in a function": "def make(k):\n    return lambda text, columns: k * value(text, 0.5)\nreward = make(2)\n",
    "object": """
class Grader:
    weight = 2.0
    def __init__(self, k, table):
        self.k, self.table = k, table
    def __call__(self, text, columns):
        return self.k * value(text, columns['shift']) * self.weight + self.table.get(text, 0)
reward = Grader(3, {"alpha": 1})
""",
    "subclass": """
class Base:
    weight = 2.0
    def score(self, text):
        return self.weight * value(text, 0.5)
class Grader(Base):
    class Inner:
        k = 3
    @property
    def k(self):
        return self.Inner.k
    @staticmethod
    def half(number):
        return number / 2
    def score(self, text):
        return super().score(text) * self.k
    def __call__(self, text, columns):
        return self.half(self.score(text))
reward = Grader()
""",
    "dataclass": """
@dataclass
class Grader:
    k: int = 3
    table: dict = field(default_factory=dict)
    weight = 2.0
    def __call__(self, text, columns):
        return self.k * value(text, columns['shift']) * self.weight + len(self.table)
reward = Grader(4)
""",
    "method": """
class Grader:
    weight = 2.0
    k = 1
    def score(self, text, columns):
        return self.k * value(text, columns['shift']) * self.weight
owner = Grader()
reward = owner.score
""",
    "partial": """
def scored(text, columns, k=1):
    return k * value(text, columns['shift'])
reward = functools.partial(scored, k=3)
""",
    "decorated": """
def twice(function):
    @functools.wraps(function)
    def wrapper(text, columns):
        return 2 * function(text, columns)
    return wrapper
@twice
def reward(text, columns):
    return value(text, columns['shift'])
""",
    "decorated without wraps": """
def times(k):
    def decorate(function):
        def wrapper(text, columns):
            return k * function(text, columns)
        return wrapper
    return decorate
@times(3)
def reward(text, columns):
    return value(text, columns['shift'])
""",
    "cached": """
@functools.lru_cache(maxsize=8)
def cached(text):
    return value(text, 0.5)
def reward(text, columns):
    return cached(text)
""",
    "trl": "def reward(completions, shift, **columns):\n    return [value(t, s) for t, s in zip(completions, shift)]\n",
    "async": """
async def one(text, shift):
    return value(text, shift)
async def reward(completions, shift, **columns):
    return await asyncio.gather(*(one(text, s) for text, s in zip(completions, shift)))
""",
    "enum and values": """
class Kind(enum.Enum):
    GOOD = 2.0
    BAD = -1.0
WEIGHTS = [Kind.GOOD, 3.0, math.inf]
PLACE, SINCE, SET = Path("a/b.txt"), datetime.date(2026, 1, 2), frozenset({"alpha", "beta"})
def reward(text, columns):
    kind = Kind.GOOD if text in SET else Kind.BAD
    return kind.value * WEIGHTS[1] + value(text, 0.5) + len(PLACE.parts) + SINCE.day
""",
    "dispatch": """
def long(text): return value(text, 0.5)
def short(text): return -value(text, 0.25)
RULES = {"long": long, "short": short, "other": [long, lambda text: 7.5]}
def reward(text, columns):
    return RULES["long" if len(text) > 4 else "short"](text) + RULES["other"][1](text)
""",
    "attributes": """
def reward(text, columns):
    return value(text, columns['shift']) * reward.k
reward.k = 3
""",
    "conditional": """
if sys.version_info > (3,):
    def reward(text, columns):
        return value(text, columns['shift']) + 0.25
else:
    def reward(text, columns):
        return 0.0
""",
    "own module": "import helper\nfrom helper import reward\n",
    "own module used": "import helper\ndef reward(text, columns): return helper.reward(text, columns) * helper.LIMIT\n",
    "own class": "import helper\nreward = helper.Grader()\n",
}
"""Base forms. Every one defines `reward`."""
MUTATIONS: Final[dict[str, str]] = {
    "global": "LIMIT = {n}",
    "global list": "WORDS.append('{w}')",
    "global list replaced": "WORDS = ('{w}', 'beta')",
    "global dict": "TABLE['{w}'[:1]] = {n}.5",
    "global set": "WORDS = {{'{w}', 'beta'}}",
    "pattern flags": "PATTERN = re.compile('[{w}]', re.IGNORECASE)",
    "deleted global": "del LIMIT",
    "infinite global": "LIMIT = math.inf",
    "object as global": "LIMIT = __import__('decimal').Decimal({n})",
    "redefined helper": "def size(text):\n    return len(text) + {n}",
    "redefined helper by exec": "exec('def size(text): return {n}')",
    "helper by lambda": "size = lambda text: len(text) * {n}",
    "helper by partial": "size = functools.partial(lambda k, text: len(text) + k, {n})",
    "code swapped": "size.__code__ = (lambda text: {n}).__code__",
    "helper's defaults": "value.__defaults__ = ({n}.5,)",
    "helper's globals": "value.__globals__['LIMIT'] = {n}",
    "name shadowed": "sum = lambda numbers: {n}",
    "monkeypatched library": "math.floor = lambda number: {n}",
    "library constant": "math.floor = math.ceil",
    "monkeypatched builtin": "builtins.abs = lambda number: {n}",
    "defaults": "reward.__defaults__ = ({n},)",
    "keyword defaults": "reward.__kwdefaults__ = {{'k': {n}, 'seen': [1]}}",
    "mutable default": "reward.__kwdefaults__['seen'].append({n})",
    "cell": "reward.__closure__[0].cell_contents = {n}",
    "list in a cell": "reward.__closure__[1].cell_contents.append('{w}')",
    "attribute": "reward.k = {n}",
    "attributes": "reward.table = {{'{w}': {n}}}",
    "class attribute": "type(reward).weight = {n}.5",
    "class attribute of a method": "Grader.weight = {n}.5",
    "inner class": "Grader.Inner.k = {n}",
    "method replaced": "Grader.__call__ = lambda self, text, columns: {n}.5",
    "base class": "Base.weight = {n}.0",
    "class redefined": "Grader = type('Grader', (), {{'weight': {n}}})",
    "bound object": "owner.k = {n}",
    "partial's keywords": "reward.keywords['k'] = {n}",
    "decorated again": "inner = reward\ndef reward(text, columns):\n    return inner(text, columns) + {n}",
    "wrapped swapped": "reward.__wrapped__ = lambda text, columns: {n}.0",
    "member changed": "Kind.GOOD._value_ = {n}.0",
    "list changed": "WEIGHTS[1] = {n}",
    "rule replaced": "RULES['long'] = lambda text: {n}.5",
    "called before": "reward('alpha', {{'shift': 0.5}})",
    "module constant": "helper.LIMIT = {n}",
    "module list": "helper.WORDS.append('{w}')",
    "module function": "helper.size = lambda text: {n}",
    "module function's code": "helper.size.__code__ = (lambda text: {n}).__code__",
    "module function's defaults": "helper.reward.__defaults__ = ({n}.5,)",
    "module class": "helper.Grader.weight = {n}.5",
    "module edited": "p = Path('helper.py'); p.write_text(p.read_text().replace('0.125', '{n}.5'))",
    "module edited, constant": "p = Path('helper.py'); p.write_text(p.read_text().replace('= 5', '= {n}'))",
    "file edited": "p = Path(__file__); "
    "p.exists() and p.write_text(p.read_text().replace('math.floor(shift)', 'shift * {n}'))",
    "file edited at its head": "p = Path(__file__); p.exists() and p.write_text('# a line\\n' * {n} + p.read_text())",
    "file edited in the reward": "p = Path(__file__); "
    "p.exists() and p.write_text(p.read_text().replace('value(t', '{n} * value(t'))",
    "definition repeated": "p = Path(__file__); s = p.read_text() if p.exists() else ''; "
    "s and p.write_text(s.replace('def size', 'def x', 1) + s)",
    "file removed": "import linecache; linecache.clearcache(); Path(__file__).unlink()",
}
HARMLESS: Final[dict[str, str]] = {
    "nothing": "",
    "unused global": "unused = open(__file__)",
    "same value": "LIMIT = 2 + 3",
    "equal list": "WORDS = [*WORDS]",
    "another name for it": "spare = [reward]",
    "comment at the end of the file": "p = Path(__file__); "
    "p.exists() and p.write_text(p.read_text() + '# a comment\\n')",
    "called before, without state": "value('alpha', 0.5)",
}
TAIL: Final = """
import json
from offbeat.errors import TaskError
from offbeat.tasks.capture import write_task
from offbeat.tasks.rewards import Answers, Reward, examine, reward_of
rows = [{"prompt": "one", "answer": "alpha", "shift": 0.5}, {"prompt": "two", "answer": "b", "shift": 1.5}]
def scores(function):
    given = json.loads(Path("rows.json").read_text())
    return [repr(getattr(one, "reward", "failed")) for row in given for one in examine(
        [function], (-math.inf, math.inf), Answers(row["texts"], row["columns"]))]
try:
    said = {"file": str(write_task(Path("task"), reward, rows))}
except TaskError as error:
    said = {"refused": str(error)}
said["scores"] = scores(reward_of(reward))
Path("said.json").write_text(json.dumps(said))
"""
LOAD: Final = """
import json, math, sys
from pathlib import Path
from offbeat.tasks.rewards import Answers, examine
from offbeat.tasks.task import custom
task = custom(path=sys.argv[1])
given = json.loads(Path(sys.argv[2]).read_text())
print(json.dumps([repr(getattr(one, "reward", "failed")) for row in given for one in examine(
    task.rewards, (-math.inf, math.inf), Answers(row["texts"], row["columns"]))]))
"""
HELD_OUT: Final = [
    {"texts": [text, text.upper(), f" {text} zeta quux", text[:1]], "columns": {"prompt": "p", "shift": shift}}
    for text, shift in (
        ("alpha beta", 2.5),
        ("quick brown", -1.5),
        ("zeta", 0.0),
        ("b", 9.75),
        ("gamma and alpha", 3.0),
    )
]


@dataclass(frozen=True)
class Case:
    """A form of reward, and what the script does after defining it."""

    number: int
    form: str
    mutations: tuple[str, ...]
    code: str
    harmless: bool


def cases(count: int, seed: int = 5) -> Iterator[Case]:
    """Yield the forms as they are and with harmless changes, then `count` mutated ones."""
    number = 0
    for form in FORMS:
        for name, code in HARMLESS.items():
            yield Case(number, form, (name,), code, True)
            number += 1
    generator = random.Random(seed)
    for i in range(count):
        form = [*FORMS][i % len(FORMS)]
        script = HEAD + HELPER + FORMS[form]
        fitting = [name for name, code in MUTATIONS.items() if fits(form, code, script)]
        chosen = tuple(generator.sample(fitting, generator.choice((1, 1, 1, 2))))
        values = {"n": generator.randrange(6, 60), "w": generator.choice(("zeta", "quux", "gamma", "beta"))}
        code = "\n".join(
            f"try:\n    {MUTATIONS[one].format(**values).replace(chr(10), chr(10) + '    ')}\n"
            "except (AttributeError, TypeError, KeyError, IndexError, NameError): pass"
            for one in chosen
        )
        yield Case(number + i, form, chosen, code, False)


def fits(form: str, code: str, script: str) -> bool:
    """Return True if what a mutation changes is in the form."""
    source = FORMS[form]
    needs = {
        "helper.": "helper",
        "helper.py": "helper",
        "Grader": "class Grader",
        "Base.": "Base",
        "Kind.": "Kind",
        "RULES": "RULES",
        "WEIGHTS": "WEIGHTS",
        "owner.": "owner",
        "keywords": "partial",
        "Inner": "Inner",
        "__closure__[0]": "make(",
        "__closure__[1]": "words",
        "__kwdefaults__": "*, k",
        "__wrapped__": "wraps",
    }
    return all(there in source for name, there in needs.items() if name in code)


def outcome(case: Case) -> dict[str, object]:
    """Run a case in processes of its own; say "equal", "refused" or "DIFFERENT"."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "helper.py").write_text(HELPER)
        (place / "rows.json").write_text(json.dumps(HELD_OUT))
        (place / "script.py").write_text(HEAD + FORMS[case.form] + case.code + TAIL)
        ran = subprocess.run([sys.executable, "script.py"], cwd=place, capture_output=True, text=True, timeout=300)
        said = json.loads((place / "said.json").read_text()) if (place / "said.json").exists() else {}
        found, detail = "refused", said.get("refused", ran.stderr[-300:])
        if "file" in said:
            command = [sys.executable, "-c", LOAD, str(place / said["file"]), str(place / "rows.json")]
            loaded = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=300)
            detail = loaded.stdout.strip() or loaded.stderr[-300:]
            found = "equal" if loaded.stdout and json.loads(loaded.stdout) == said["scores"] else "DIFFERENT"
        elif "refused" not in said:
            found = "BROKEN"
    return {"number": case.number, "form": case.form, "mutations": case.mutations, "harmless": case.harmless,
            "outcome": found, "detail": detail[:400]}  # fmt: skip


def main() -> None:
    arguments = command_parser(__doc__, short="30 cases and 30 unchanged ones; records nothing").parse_args()
    chosen = [*cases(30 if arguments.short else CASES)]
    done: list[dict[str, object]] = []
    if arguments.short:
        chosen = [one for one in chosen if not one.harmless or one.mutations == ("nothing",)]
    elif RESULTS.exists():
        done = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    left = [one for one in chosen if one.number not in {entry["number"] for entry in done}]
    with ThreadPoolExecutor(2) as pool:
        for entry in pool.map(outcome, left):
            done.append(entry)
            if not arguments.short:
                with RESULTS.open("a") as file:
                    file.write(json.dumps(entry) + "\n")
    mutated, harmless = ([one for one in done if one["harmless"] is kind] for kind in (False, True))
    for one in done:
        if one["outcome"] not in ("equal", "refused") or (one["harmless"] and one["outcome"] == "refused"):
            print({**one, "detail": str(one["detail"])[-200:]})
    ends, plain = (Counter(str(one["outcome"]) for one in kind) for kind in (mutated, harmless))
    figure = Figure(
        "trust.5",
        "captured rewards, mutated after their definition, that score as given in a new process, or are refused",
        f"{len(mutated)} of {len(mutated)}",
        f"{ends['equal'] + ends['refused']} of {len(mutated)}",
        "rewards",
        ends["equal"] + ends["refused"] == len(mutated),
        len(mutated),
        f"{ends['equal']} equal, {ends['refused']} refused; {len(FORMS)} forms, {len(MUTATIONS)} kinds of mutation; of "
        f"{len(harmless)} unchanged or harmlessly changed ones {plain['refused']} are refused; {machine()}",
    )
    sys.exit(0 if report(arguments.short, figure) else 1)


if __name__ == "__main__":
    main()
