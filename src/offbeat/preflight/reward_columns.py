"""What the source of a reward function tells before anything is generated: columns the data lack, nothing written."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence

from offbeat.errors import suggest_nearest
from offbeat.tasks.rewards import OF_TRL, Reward
from offbeat.tasks.task import Task

ROWS = 10_000
"""Examples to look at."""


def check_columns(task: Task, name: str) -> list[str]:
    """Return one problem for each column that a reward function needs and some examples do not have.

    A function that only raises is a problem too: nobody has written it yet.
    """
    examples = task.examples[: min(ROWS, len(task.examples))]
    columns = {column for example in examples for column in example.record}
    found = []
    for reward in task.rewards:
        if any(isinstance(node, ast.FunctionDef) and _only_raises(node) for node in _source(_plain(reward)).body):
            found.append(f"task.name = {name!r}: reward {reward.name!r} is not written yet: it only raises; write it")
        for column in sorted(set(_needed(reward))):
            without = [example.id for example in examples if column not in example.record]
            if not without:
                continue
            near = suggest_nearest(column, sorted(columns - {"prompt", column}) or ["prompt"])
            lack = "the data does not have" if column not in columns else f"{_some(without)} do not have"
            found.append(
                f"task.name = {name!r}: reward {reward.name!r} names the column {column!r}, which {lack}; {near}"
            )
    return found


def _some(ids: Sequence[str]) -> str:
    return f"{len(ids)} of the rows ({', '.join(ids[:3])}{', …' if len(ids) > 3 else ''})"


def _needed(reward: Reward) -> Iterator[str]:
    """Yield the columns that a function cannot do without, as far as its source tells."""
    function = _plain(reward)
    if reward.trl:
        for one in inspect.signature(reward.function).parameters.values():
            if one.kind is not one.VAR_KEYWORD and one.default is one.empty and one.name not in OF_TRL:
                yield one.name
    parameters = list(inspect.signature(function).parameters.values())
    mapping = next((one.name for one in parameters if one.kind is one.VAR_KEYWORD), None) if reward.trl else (
        parameters[1].name if len(parameters) > 1 else None
    )  # fmt: skip
    for node in ast.walk(_source(function)):
        match node:
            case ast.Subscript(ast.Name(id=name), ast.Constant(value=str(column)), ast.Load()) if name == mapping:
                yield column


def _plain(reward: Reward) -> Callable[..., object]:
    """Return the function itself, without partials and wrappers."""
    function: Callable[..., object] = inspect.unwrap(getattr(reward.function, "func", reward.function))
    return function


def _source(function: Callable[..., object]) -> ast.Module:
    """Return the syntax tree of a function; an empty one for a builtin, or a function without a source."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return ast.Module([], [])


def _only_raises(function: ast.FunctionDef) -> bool:
    return isinstance(function.body[-1], ast.Raise) and all(isinstance(one, ast.Expr) for one in function.body[:-1])
