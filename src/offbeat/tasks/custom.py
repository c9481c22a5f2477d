"""`custom`: a task in a file of the user's own, by path.

The file defines either `task`, a `Task`; or `examples` and `reward`, a list and a function:

    examples = [{"prompt": "1+1=", "answer": "2"}]

    def reward(text, columns):
        return float(text.strip() == columns["answer"])

`examples` may hold `Example`s or dictionaries with a 'prompt', and may be a function that returns them. `rewards`, a
list, stands for several: functions, or `Reward(function, weight=…)`. A function whose first parameter is `completions`
or `prompts` is called as TRL calls it. `reward_range`, `deadline` and `answer` are as in `Task`.
"""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from offbeat.errors import TaskError, nearest
from offbeat.imports import load_file
from offbeat.tasks.data import ColumnMap, Deferred
from offbeat.tasks.rewards import Reward, from_trl
from offbeat.tasks.task import Example, Task

_SETTINGS: Final = ("reward_range", "deadline", "answer", "slice_by", "environment")
_TRL_PARAMETERS: Final = {"completions", "prompts", "completion_ids"}


def custom(*, path: str) -> Task:
    """The task in a file. It is the user's own code and runs as such.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     file = Path(place, "shout.py")
    ...     _ = file.write_text(
    ...         "examples = [{'prompt': 'Say hello.'}]\\n"
    ...         "def reward(completions, **columns):\\n    return [float(c.isupper()) for c in completions]\\n"
    ...     )
    ...     task = custom(path=str(file))
    >>> task.name, task.examples[0].prompt, task.rewards[0].trl
    ('shout', 'Say hello.', True)
    """
    module = load_file(Path(path))
    if isinstance(task := getattr(module, "task", None), Task):
        return task
    given = vars(module)
    rewards = given.get("rewards", [given["reward"]] if "reward" in given else [])
    if "examples" not in given or not rewards:
        missing = "examples" if "examples" not in given else "reward"
        names = [name for name in given if not name.startswith("_")]
        raise TaskError(f"{path} defines no {missing!r} (nor a `task`); {nearest(missing, names)}")
    settings: dict[str, Any] = {name: given[name] for name in _SETTINGS if name in given}
    return Task(
        Path(path).stem, Deferred(lambda: _examples(module, path)), tuple(_reward(r) for r in rewards), **settings
    )


def _examples(module: ModuleType, path: str) -> Sequence[Example]:
    given = module.examples() if callable(module.examples) else module.examples
    columns = ColumnMap()
    found = []
    for number, entry in enumerate(given):
        if not isinstance(entry, (Example, Mapping)):
            raise TaskError(
                f"{path}: example {number} is {entry!r:.80}; need an Example, or a dictionary with 'prompt'"
            )
        id_ = f"{Path(path).stem}-{number}"
        found.append(entry if isinstance(entry, Example) else columns.example(entry, id_))
    return found


def _reward(given: object) -> Reward:
    if isinstance(given, Reward):
        return given
    if not callable(given):
        raise TaskError(f"{given!r:.80} is not a reward: it is neither a function nor a Reward")
    first = next(iter(inspect.signature(given).parameters), "")
    return from_trl(given) if first in _TRL_PARAMETERS else Reward(given)
