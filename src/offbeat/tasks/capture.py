"""A task made from Python objects: reward functions and a dataset, written as files that any process can load.

`offbeat.train(model, reward, dataset)` calls this. Scoring processes, workers on other machines and `offbeat resume`
cannot see the objects of your session, so the run directory gets a task file with the source of the reward functions
and of everything in your script or notebook that they use:

    correct (your notebook)  ── uses ──► re (imported) · normalize (your notebook) · LIMIT = 20
        task/correct.py:  import re · LIMIT = 20 · def normalize … · def correct … · examples from examples.jsonl

Functions of your own modules are imported from there, as are functions of installed packages. A lambda, a
`functools.partial`, a method and an object with `__call__` get a name in the file; an object is made again from its
class and its attributes.
"""

import __future__

import ast
import copyreg
import inspect
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import IO, Any, Final, cast

from offbeat.errors import DataError, TaskError
from offbeat.imports import find_name, own_root
from offbeat.secrecy import SECRET_NAME, find_secret
from offbeat.tasks.data import rows
from offbeat.tasks.reward_model import reward_model
from offbeat.tasks.rewards import Reward, reward_of
from offbeat.tasks.same_reward import first_difference, read_names

RewardFunction = Callable[..., object] | Reward | str | os.PathLike[str]
"""A reward function, or the directory of a reward model."""
_HEAD: Final = (
    '"""The task of a run: examples beside this file, and reward functions as they were when the run began."""\n'
)
_EXAMPLES: Final = """
def {name}():
    with Path(__file__).with_name("{name}.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
"""
_OWN: Final = object()
_FILE_NAMES: Final[Mapping[str, object]] = {
    "json": json,
    "Path": Path,
    "Reward": Reward,
    **dict.fromkeys(("examples", "evaluation_examples", "reward_range", "rewards", "__name__", "__file__"), _OWN),
}
"""What names of a task file stand for before any reward function is written into it."""
_SESSIONS: Final = {"__main__", "__mp_main__"}
_FUTURE: Final = "from __future__ import annotations"


def write_task(
    directory: Path,
    rewards: RewardFunction | Sequence[RewardFunction],
    dataset: object,
    evaluation: object = None,
    reward_range: tuple[float, float] = (-math.inf, math.inf),
) -> Path:
    """Write a task file and its data into `directory`, and return the path of the file. It is named like the reward.

    Args:
        directory: Made if it does not exist.
        rewards: One function or several, also as `Reward` with a weight, or as the directory of a reward model.
        dataset: Rows to train on: a list of dictionaries or prompts, a JSONL or Parquet file, or a `Dataset`.
        evaluation: Rows to evaluate on, in the same forms; None leaves it to the task to hold some out.
        reward_range: A reward outside ends the run.
    """
    chosen = list(rewards) if isinstance(rewards, Sequence) and not isinstance(rewards, str) else [rewards]
    listed = [one if isinstance(one, Reward) else _reward(one) for one in chosen]
    if not listed:
        raise TaskError("there is no reward function; give at least one")
    for i, (given, one) in enumerate(zip(chosen, listed, strict=True)):
        if not isinstance(given, Reward) and (same := [other.name for other in listed[:i]].count(one.name)):
            listed[i] = replace(one, name=f"{one.name}_{same + 1}")
    source = SourceCapture({"import json\nfrom pathlib import Path\n\nfrom offbeat import Reward": None})
    entries = []
    for one in listed:
        setup = f", setup={source.use(one.setup, '_setup')}" if one.setup else ""
        function = source.use(one.function, "_reward")
        setup += f", files={[str(Path(file).resolve()) for file in one.files]}" if one.files else ""
        entries.append(f"Reward({function}, name={one.name!r}, weight={one.weight!r}, trl={one.trl}{setup})")
    splits = _splits(dataset, evaluation)
    text = str(source)
    refuse_secrets(text)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)
    for name, content in splits.items():
        _write_rows(directory / f"{name}.jsonl", content)
    parts = [
        f"{_HEAD}\n{text}\n",
        *(_EXAMPLES.format(name=name) for name in splits),
        f"reward_range = (float('{reward_range[0]}'), float('{reward_range[1]}'))\n",
        f"rewards = [{', '.join(entries)}]\n",
    ]
    path = directory / (re.sub(r"[^\w-]", "_", listed[0].name) + ".py")
    with open_private(path) as file:
        file.write("\n".join(parts))
    require_same(path, "rewards", listed, _samples(directory / "examples.jsonl"))
    return path


def _samples(path: Path) -> list[dict[str, Any]]:
    """Return answers to the first rows: the text of each column, as it may be right, alone and within a sentence."""
    found = []
    with path.open(encoding="utf-8") as lines:
        for row in map(json.loads, itertools.islice(lines, 3)):
            texts = [text for one in row.values() for text in (f"{one}", f"It is {one}.")][-6:]
            found.append({"texts": texts, "columns": row, "token_ids": [[*text.encode()] for text in texts]})
    return found


def open_private(path: Path) -> IO[str]:
    """Open a file to write that only its owner can read."""
    file = open(path, "w", encoding="utf-8", opener=partial(os.open, mode=0o600))  # noqa: SIM115
    os.fchmod(file.fileno(), 0o600)  # it may have existed
    return file


def refuse_secrets(text: str) -> None:
    """Raise `TaskError` if source that is about to be written holds what looks like a secret.

    >>> refuse_secrets("def judge(text, columns, api_key='sk-0123456789abcdef'): ...")
    Traceback (most recent call last):
    offbeat.errors.TaskError: api_key looks like a secret, and its value would be written into the run directory; ...
    """
    if name := find_secret(text):
        raise TaskError(
            f"{name} looks like a secret, and its value would be written into the run directory; read it inside the "
            'function, from an environment variable: os.environ["NAME"]'
        )


def require_same(path: Path, name: str, live: object, samples: Sequence[Mapping[str, Any]] = ()) -> None:
    """Raise `TaskError` if what a file calls `name` is not `live`. The message shows no secrets."""
    if different := first_difference(path, name, live, samples):
        if SECRET_NAME.search(different) or find_secret(different):
            different = different.split(" is ")[0] + " differs"
        raise TaskError(
            f"another process would not get what is here: {different}; put {path.stem}, as it is now and with all that "
            "it uses, into a Python file, and import it from there in a new session"
        )


def _reward(given: object) -> Reward:
    if isinstance(given, str | os.PathLike):
        return reward_model(given)
    if any(kind.__name__ == "PreTrainedModel" for kind in type(given).__mro__):  # without importing transformers
        raise TaskError("a reward model is given by its directory: save it with `save_pretrained`, and give the path")
    if not callable(given):
        raise TaskError(
            f"reward = {given!r:.80} is not a function; give a function such as `def correct(text, columns)`"
        )
    return reward_of(given)


def _splits(dataset: object, evaluation: object) -> dict[str, Iterator[Mapping[str, Any]]]:
    """Return the rows to train on and, if there are any, to evaluate on. A dataset with splits gives both."""
    if isinstance(dataset, Mapping):
        if "train" not in dataset:
            raise DataError(f"the dataset has no split 'train', only {', '.join(map(repr, dataset))}; give one of them")
        evaluation = dataset.get("test") if evaluation is None else evaluation
        dataset = dataset["train"]
    found = {"examples": _rows(dataset)}
    return found if evaluation is None else found | {"evaluation_examples": _rows(evaluation)}


def _rows(dataset: object) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a dataset in any of its forms."""
    if isinstance(dataset, str | os.PathLike):
        yield from rows(os.fspath(dataset))
        return
    if not isinstance(dataset, Iterable):
        raise DataError(
            f"dataset is a {type(dataset).__name__}; give a list of dictionaries, a file or a `datasets.Dataset`"
        )
    for number, row in enumerate(dataset):
        if not isinstance(row, str | Mapping):
            raise DataError(
                f"row {number} of the dataset is {row!r:.80}; it must be a dictionary with a 'prompt', or text"
            )
        yield {"prompt": row} if isinstance(row, str) else row


def _write_rows(path: Path, content: Iterable[Mapping[str, Any]]) -> None:
    count = 0
    with open_private(path) as file:
        for number, row in enumerate(content):
            try:
                file.write(json.dumps(dict(row), ensure_ascii=False, allow_nan=False) + "\n")
            except (TypeError, ValueError) as error:
                raise DataError(
                    f"row {number} of the dataset cannot be stored as JSON: {error}; drop that column"
                ) from None
            count += 1
    if not count:
        raise DataError("the dataset has no rows; give at least one row with a 'prompt'")


@dataclass
class SourceCapture:
    """Collects Python source that defines functions of a session in another process.

    >>> import math
    >>> capture = SourceCapture()
    >>> capture.use(math.isclose)
    'isclose'
    >>> print(capture)
    from math import isclose
    """

    _imports: dict[str, None] = field(default_factory=dict)
    _definitions: dict[str, str] = field(default_factory=dict)
    _values: dict[str, object] = field(default_factory=lambda: dict(_FILE_NAMES))
    """What each name stands for."""

    def use(self, value: object, hint: str = "") -> str:
        """Make an object available, and return its name: its own, or one like `hint` if it has none."""
        name = _own_name(value)
        if not name:
            name = next(
                one for i in itertools.count(1) if (one := f"{hint}_{i}" if i > 1 else hint) not in self._values
            )
        self._define(name, value, user=name)
        return name

    def _claim(self, name: str, value: object) -> bool:
        """Let a name stand for a value. Returns False if it does already; raises if it stands for another one."""
        if name not in self._values:
            self._values[name] = value
            return True
        other = self._values[name]
        if other is value or (type(other) is type(value) and _is_constant(value) and other == value):
            return False
        if other is _OWN:
            raise TaskError(
                f"a reward function uses {name!r}, which every task file has itself; rename yours, or "
                "put the function into a Python file and import it"
            )
        raise TaskError(
            f"the reward functions use two different things called {name!r}; rename one of them, or put the functions "
            "into Python files and import them"
        )

    def _source(self, value: Any, name: str) -> str:
        """Return the statements that define a function or class. A function within another one stays within one.

        What is given of a decorated function is what its decorators returned: the source of that needs no decorators,
        unless they say that it stands for another function, as `functools.wraps` does.
        """
        try:
            source = inspect.getsource(value).rstrip()
            indent = source[: len(source) - len(source.lstrip())]
            node = ast.parse(f"if True:\n{source}" if indent else source).body[0]
            node = node.body[0] if isinstance(node, ast.If) else node
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                raise SyntaxError
        except (OSError, TypeError, SyntaxError):
            raise TaskError(
                f"the source of {name} cannot be found, so scoring processes cannot load it; put it into a Python file "
                "and import it"
            ) from None
        if isinstance(value, FunctionType) and not hasattr(value, "__wrapped__"):
            source = "\n".join(source.split("\n")[node.lineno - 1 - bool(indent) :])
        value = inspect.unwrap(value)
        if any(one.__code__.co_flags & __future__.annotations.compiler_flag for one in _functions(value)):
            self._imports.setdefault(_FUTURE)
        if "<locals>" not in value.__qualname__:
            source = f"if True:\n{source}" if indent else source
            self._define_used(source, value, name)
            return source
        closed = _closure(value)
        source = f"def _make_{name}({', '.join(closed)}):\n{source}\n{indent}return {name}"
        self._define_used(source, value, name)
        for key, one in closed.items():
            own = _own_name(one)
            if own in self._values and own not in self._definitions and not _importable(one):
                raise TaskError(
                    f"{name} and {key} call each other and are defined within another function, so neither can be "
                    "written first; define both at the top level, outside any function"
                )
        given = [self._expression(one, key, name) for key, one in closed.items()]
        return f"{source}\n\n\n{name} = _make_{name}({', '.join(given)})"

    def _define(self, name: str, value: object, user: str) -> None:
        if not self._claim(name, value):
            return
        if isinstance(value, ModuleType):
            self._import(value, f"import {_aliased(value.__name__, name)}")
        elif place := _importable(value):
            self._import(place[0], f"from {place[0].__name__} import {_aliased(place[1], name)}")
        elif own_name := _own_name(value):
            self._claim(own_name, value)
            if isinstance(value, FunctionType) and {"registry", "dispatch", "__wrapped__"} <= vars(value).keys():
                raise TaskError(
                    f"{own_name} is a functools.singledispatch function: a task file cannot hold the functions that "
                    f"are registered with it; put {user} and {own_name} into a Python file and import {user} from there"
                )
            source = self._source(value, own_name)
            if isinstance(value, FunctionType) and vars(value) and not hasattr(value, "__wrapped__"):
                source += f"\n\n\nvars({own_name}).update({self._expression(vars(value), own_name, own_name)})"
            self._definitions[name] = source if own_name == name else f"{source}\n\n{name} = {own_name}"
        elif (state := _state(value)) is not None:
            made = self.use(type(value))
            parts = self._expression(state, name, type(value).__name__)
            self._definitions[name] = f"{name} = object.__new__({made})\nvars({name}).update({parts})"
        else:
            self._definitions[name] = f"{name} = {self._expression(value, name, user)}"

    def _define_used(self, source: str, value: object, user: str) -> None:
        for name, used in _session_names(source, value):
            self._define(name, used, user)

    def _expression(self, value: object, name: str, user: str) -> str:
        """Return Python that makes a value again. Functions, classes and objects are defined under their names."""
        if _is_literal(value):
            return repr(value)
        if type(value) in (dict, list, tuple, set, frozenset):
            parts = cast("Iterable[Any]", value.items() if isinstance(value, dict) else value)
            items = [self._expression(one, f"{one[0]}" if type(value) is dict else name, user) for one in parts]
            return f"{type(value).__name__}([{', '.join(items)}])"
        if isinstance(value, partial):
            user = _own_name(value.func) or user
            given = [self._expression(one, f"{name}_{i}", user) for i, one in enumerate(value.args)]
            given += [f"{key}={self._expression(one, key, user)}" for key, one in value.keywords.items()]
            return f"{self.use(partial)}({', '.join([self.use(value.func, f'{name}_function'), *given])})"
        if isinstance(value, MethodType):
            return f"{self.use(value.__self__, f'{name}_object')}.{value.__func__.__name__}"
        if isinstance(value, FunctionType) and not _own_name(value):
            closed = _closure(value)
            source = f"({_lambda_source(value)})"
            if "<locals>" in value.__qualname__:
                source = f"(lambda {', '.join(closed)}: {source})"
            self._define_used(f"{name} = {source}", value, name)
            given = [self._expression(one, key, user) for key, one in closed.items()]
            return source + f"({', '.join(given)})" * ("<locals>" in value.__qualname__)
        if _own_name(value) or _state(value) is not None:
            return self.use(value, name)
        if (made := _call(value)) is not None:
            return f"{self.use(made[0])}({', '.join(self._expression(one, name, user) for one in made[1])})"
        raise TaskError(
            f"{user} uses {name!r}, a {type(value).__name__}, which a scoring process cannot get from here; put {user} "
            f"and {name} into a Python file and import {user} from there, or make {name} inside the function"
        )

    def _import(self, module: ModuleType, statement: str) -> None:
        if root := own_root(module):
            self._imports.setdefault(f"import sys\nsys.path.insert(0, {root!r})")
        self._imports.setdefault(statement)

    def __str__(self) -> str:
        imports = sorted(self._imports, key=lambda one: one != _FUTURE)
        return "\n".join(imports) + "".join(f"\n\n\n{one}" for one in self._definitions.values() if one)


def _own_name(value: object) -> str:
    """Return the name in the definition of a function or class; empty for a lambda and for other objects."""
    named = inspect.isfunction(value) or inspect.isclass(value) or inspect.isbuiltin(value)
    named |= isinstance(value, type(cache(len)))
    name = str(getattr(value, "__name__", "")) if named else ""
    return name if name.isidentifier() else ""


def _importable(value: object) -> tuple[ModuleType, str] | None:
    """Return the module and the name to import a function, a class or an object from, unless it is of the session."""
    place = find_name(value) if callable(value) else None
    if place is None or place[0].__name__ in _SESSIONS or not all(map(str.isidentifier, place[0].__name__.split("."))):
        return None
    return place if place[1].isidentifier() else None


def _state(value: object) -> dict[str, object] | None:
    """Return the attributes of an object if its class and they make it again, as copying would; otherwise None."""
    if isinstance(value, FunctionType | MethodType | ModuleType | partial | re.Pattern | type) or _is_literal(value):
        return None
    try:
        made, arguments, state, *items = cast("tuple[Any, ...]", value.__reduce_ex__(2))
    except Exception:  # the boundary to any class: whatever it raises, it cannot be copied
        return None
    whole = made is copyreg.__newobj__ and arguments == (type(value),) and not any(items)  # type: ignore[attr-defined]
    return state or {} if whole and isinstance(state, dict | None) else None


def _call(value: object) -> tuple[Callable[..., object], tuple[object, ...]] | None:
    """Return the call that makes a value again, for instance a path, a date or a member of an enum."""
    if isinstance(value, float):
        return float, (str(value),)
    if isinstance(value, re.Pattern):
        return re.compile, (value.pattern, int(value.flags))
    try:
        made, arguments, *rest = cast("tuple[Any, ...]", value.__reduce_ex__(2))
    except Exception:  # as above
        return None
    return None if any(rest) or made is copyreg.__newobj__ else (made, arguments)  # type: ignore[attr-defined]


def _lambda_source(function: FunctionType) -> str:
    """Return the text of a lambda, found by its place in the file or cell that defines it."""
    code = function.__code__
    try:
        source = "".join(inspect.findsource(function)[0])
        tree = ast.parse(source)
    except (OSError, SyntaxError):
        raise TaskError(
            "the source of a lambda cannot be found, so scoring processes cannot load it; define the reward with `def`"
        ) from None
    begins = min((line, column) for line, _, column, _ in code.co_positions() if line and column is not None and column)
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda) and node.lineno == code.co_firstlineno:
            body = node.body
            if (body.lineno, body.col_offset) <= begins <= (body.end_lineno or 0, body.end_col_offset or 0):
                return str(ast.get_source_segment(source, node))
    raise TaskError("a lambda cannot be found in its source; define the reward with `def`")


def _aliased(path: str, name: str) -> str:
    return path if path == name else f"{path} as {name}"


def _session_names(source: str, value: Any) -> Iterator[tuple[str, object]]:
    """Yield the names that source takes from the module of a function or class, with their values."""
    outer = vars(sys.modules[value.__module__]) if inspect.isclass(value) else value.__globals__
    for name in sorted(read_names(compile(source, "<source>", "exec", dont_inherit=True))):
        if name in outer:
            yield name, outer[name]


def _functions(value: Any) -> list[FunctionType]:
    """Return a function, or the functions of a class."""
    return [value] if isinstance(value, FunctionType) else [*filter(inspect.isfunction, vars(value).values())]


def _closure(value: Any) -> dict[str, object]:
    """Return the variables that a function, or the functions of a class, take from the function around them."""
    found = [zip(one.__code__.co_freevars, one.__closure__ or (), strict=True) for one in _functions(value)]
    with suppress(ValueError):  # a variable without a value
        return {name: cell.cell_contents for cells in found for name, cell in cells if cell.cell_contents is not value}
    return {}


def _is_literal(value: object) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False


def _is_constant(value: object) -> bool:
    return isinstance(value, re.Pattern) or _is_literal(value)
