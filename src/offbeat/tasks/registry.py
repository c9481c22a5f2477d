"""Task names and the factories behind them, imported when asked for."""

from collections.abc import Callable, Mapping
from typing import Final, cast

from offbeat.errors import TaskError, nearest
from offbeat.imports import resolve
from offbeat.tasks.task import Task
from offbeat.types import Json

FACTORIES: Final[Mapping[str, str]] = {
    "arithmetic": "offbeat.tasks.arithmetic:arithmetic",
    "gsm8k": "offbeat.tasks.gsm8k:gsm8k",
    "reasoning_gym": "offbeat.tasks.reasoning_gym:reasoning_gym",
    "math": "offbeat.tasks.latex_math:latex_math",
    "python_code": "offbeat.tasks.python_code:python_code",
    "custom": "offbeat.tasks.custom:custom",
}
"""Name → module:function. A factory takes keyword options that are JSON and returns a `Task`."""


def make(name: str, options: Mapping[str, Json] | None = None) -> Task:
    """The task of that name.

    >>> make("arithmetic", {"digits": 2}).name
    'arithmetic'
    >>> make("arithmetik")
    Traceback (most recent call last):
    ...
    offbeat.errors.TaskError: 'arithmetik' is not a task; did you mean 'arithmetic'?
    """
    if name not in FACTORIES:
        hint = " (a file of your own: task 'custom' with path=…)" if name.endswith(".py") else ""
        raise TaskError(f"{name!r} is not a task; {nearest(name, FACTORIES)}{hint}")
    factory = cast("Callable[..., Task]", resolve(FACTORIES[name]))
    try:
        return factory(**dict(options or {}))
    except TypeError as error:
        raise TaskError(f"task {name!r}: {error}") from error
