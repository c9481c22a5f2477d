"""The layout of imported rows: which column has which role, detected from names and values or given by the user.

There are three shapes, and the log's own export:

    one row per prompt       {"prompt": …, "responses": [… …], "rewards": [1, 0]}
    one row per completion   {"problem_id": 7, "prompt": …, "response": …, "reward": 1}
    one row per conversation {"messages": [… …, {"role": "assistant", …}], "reward": 1}

A prompt or a completion is a text, a list of messages, or a list of token ids. Names of ids such as `id` mean different
things in different files, so they are decided by the first rows: an id that occurs with two different completions does
not name a completion.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal

from offbeat.errors import CannotImport, suggest_nearest
from offbeat.experience.importing.records import Row
from offbeat.types import PROMPT_COLUMNS

ID_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "group": ("group_id", "group"),
    "prompt_id": ("prompt_id", "problem_id", "question_id"),
    "completion_id": (
        *("completion_id", "answer_id", "response_id", "sample_id"),
        *("completion_ids", "answer_ids", "response_ids", "sample_ids", "request_ids"),
    ),
}
"""The column names that other tools use for ids, the most reliable first."""

UNDECIDED: Final = ("request_id", "uid", "id")
"""Names whose role depends on the values."""


def canonical_cell(value: object) -> str:
    """Return a text that is equal for equal cells."""
    return json.dumps(value, sort_keys=True, default=str)


def find_ids(
    rows: Sequence[Row], given: Mapping[str, str], used: Collection[str], *, prompt: str, response: str, lists: bool
) -> dict[str, str]:
    """Return the columns of ids by role: those given, and those detected among the columns that are not used yet.

    >>> rows = [{"id": 1, "prompt": "2+2=", "response": "4"}, {"id": 2, "prompt": "2+2=", "response": "5"}]
    >>> find_ids(rows, {}, (), prompt="prompt", response="response", lists=False)
    {'completion_id': 'id'}

    Args:
        rows: The first few rows.
        given: Columns by role, as the user set them.
        used: Columns that have another role.
        prompt: The column of the prompt, or of the conversation.
        response: The column of the completion, or of the conversation.
        lists: True if a row has all completions of a prompt.
    """
    found = {role: given[role] for role in ID_NAMES if role in given}
    for role, names in ID_NAMES.items():
        per_completion = lists and role == "completion_id"
        for name in names:
            free = name not in used and name not in found.values()
            if role not in found and free and _holds_ids(rows, name, in_lists=per_completion):
                found[role] = name
    for name in UNDECIDED:
        if name not in used and name not in found.values() and _holds_ids(rows, name, in_lists=False):
            role = _role_in_lists(name) if lists else _role_in_rows(rows, name, prompt, response)
            found.setdefault(role, name)
    return found


def _holds_ids(rows: Sequence[Row], name: str, *, in_lists: bool) -> bool:
    cells = [row[name] for row in rows if row.get(name) is not None]
    if in_lists:
        if not all(isinstance(cell, list) for cell in cells):
            return False
        cells = [part for cell in cells if isinstance(cell, list) for part in cell]
    return bool(cells) and all(isinstance(cell, str | int) and not isinstance(cell, bool) for cell in cells)


def _role_in_lists(name: str) -> str:
    """Return the role of an id that a row with several completions has once."""
    return "prompt_id" if name == "id" else "group"


def _role_in_rows(rows: Sequence[Row], name: str, prompt: str, response: str) -> str:
    responses: dict[str, set[str]] = {}
    ids_of_prompt: dict[str, set[str]] = {}
    for row in rows:
        id_, asked = canonical_cell(row.get(name)), row.get(prompt)
        if prompt == response and isinstance(asked, list):  # a conversation: its last message is the completion
            asked = asked[:-1]
        responses.setdefault(id_, set()).add(canonical_cell(row.get(response)))
        ids_of_prompt.setdefault(canonical_cell(asked), set()).add(id_)
    shared = any(len(several) > 1 for several in responses.values())
    if name == "uid" and not shared and all(len(ids) == 1 for ids in ids_of_prompt.values()):
        return "group"  # one answer to each prompt so far: verl's dumps use this name for groups
    return ("group" if name == "uid" else "prompt_id") if shared else "completion_id"


class RowShape(StrEnum):
    """How completions are arranged in rows."""

    LISTS = "one row per prompt, its completions in lists"
    ROWS = "one row per completion"
    CONVERSATIONS = "one conversation per row, its last message being the completion"
    EXPORT = "rows exported from an experience log; ids, versions and scores are kept"


ROLES: Final[dict[str, tuple[str, ...]]] = {
    "prompt": ("prompt_token_ids", "prompt_ids", *PROMPT_COLUMNS),
    "response": (
        *("response_token_ids", "completion_token_ids", "completion_ids", "responses", "response"),
        *("completions", "completion", "outputs", "output", "generations", "generation", "candidates", "samples"),
        "answers",  # of a question; a single `answer` is mostly the reference
    ),
    "reward": ("rewards", "reward", "scores", "score"),
    "logprobs": ("behavior_logprobs", "logprobs", "log_probs", "token_logprobs", "response_logprobs"),
    "finish": ("finish_reasons", "finish_reason", "finishes", "finish"),
    "conversation": ("messages", "conversations", "conversation"),
    "source": (),  # other tools use these two for other things, so they are never detected
    "task": (),
}
"""The column names that other tools use for each role, the most reliable first. `ID_NAMES` has those of ids."""

PLURALS: Final = {
    **{"responses": "response", "rewards": "reward", "finishes": "finish", "sources": "source"},
    **{"completion_ids": "completion_id", "group_id": "group"},
}

EXPORTED: Final = (
    *("group_id", "completion_id", "task", "prompt_id", "prompt_token_ids", "prompt_columns", "token_ids"),
    *("behavior_logprobs", "versions", "loss_mask", "finish", "source", "reward", "unscorable", "detail", "breakdown"),
)
"""The columns of an export (`rows_out.py`)."""

CellKind = Literal["text", "messages", "token ids", "nothing"]


def cell_kind(value: object) -> CellKind | None:
    """Return how a prompt or a completion is given, or None for any other value.

    >>> cell_kind("2 + 2 ="), cell_kind([1, 2]), cell_kind([{"role": "user", "content": "2 + 2 ="}])
    ('text', 'token ids', 'messages')
    >>> cell_kind([]), cell_kind(7)
    ('nothing', None)
    """
    match value:
        case str():
            return "text"
        case {"role": _} | {"from": _}:
            return "messages"
        case []:
            return "nothing"
        case [bool(), *_]:
            return None
        case [int(), *_]:
            return "token ids"
        case [{"role": _} | {"from": _}, *_]:
            return "messages"
    return None


@dataclass(frozen=True)
class ColumnLayout:
    """The role of each column.

    >>> rows = [{"question": "2 + 2 =", "said": ["4", "5"], "score": [1, 0], "id": 7, "day": "Monday"}]
    >>> print(detect(rows, parse_columns("responses=said")))
    one row per prompt, its completions in lists
      prompt    <- question (text)
      response  <- said (text)
      reward    <- score
      prompt_id <- id
      logprobs: none, so they are unknown
      not used: day
    """

    shape: RowShape
    columns: Mapping[str, str]
    """Column name by role."""
    group_by: tuple[str, ...] = ()
    """Columns that are equal in all rows of a group; empty if rows are grouped by their prompt."""
    group_id: tuple[str, ...] = ()
    """Columns that are the group's own id; empty if its id is made from its content."""
    kept: tuple[str, ...] = ()
    """Columns to store as the prompt's columns."""
    kinds: Mapping[str, CellKind] = field(default_factory=dict)
    unused: tuple[str, ...] = ()

    @property
    def needed(self) -> list[str]:
        """All columns to read."""
        if self.shape is RowShape.EXPORT:
            return list(EXPORTED)
        return list(dict.fromkeys([*self.columns.values(), *self.group_by, *self.group_id, *self.kept]))

    @property
    def roles(self) -> list[tuple[str, str]]:
        """Pairs of role and column, the group's own id included."""
        return [*self.columns.items(), *([("group_id", "+".join(self.group_id))] if self.group_id else [])]

    @property
    def has_text(self) -> bool:
        """True if a tokenizer is needed."""
        return any(kind in ("text", "messages") for kind in self.kinds.values())

    def key(self, row: Row) -> str:
        """Return the key that all rows of a group share."""
        if self.group_by:
            return canonical_cell([row.get(column) for column in self.group_by])
        if self.shape is RowShape.CONVERSATIONS:
            messages = row.get(self.columns["conversation"])
            return canonical_cell(messages[:-1] if isinstance(messages, list) else messages)
        return canonical_cell(row.get(self.columns["prompt"]))

    def __str__(self) -> str:
        lines = [self.shape.value]
        if self.shape is RowShape.EXPORT:
            return lines[0]
        shown = {role: column + (f" ({self.kinds[role]})" if role in self.kinds else "") for role, column in self.roles}
        width = max(9, *map(len, shown))
        lines += [f"  {role:<{width}} <- {column}" for role, column in shown.items()]
        if self.shape is not RowShape.LISTS:
            lines.append(f"  grouped by {' and '.join(self.group_by) or 'the prompt'}")
        if "logprobs" not in self.columns:
            lines.append("  logprobs: none, so they are unknown")
        if "reward" not in self.columns:
            lines.append("  reward: none, so feedback is awaited")
        if self.kept:
            lines.append(f"  kept with the prompt: {', '.join(self.kept)}")
        if self.unused:
            lines.append(f"  not used: {', '.join(self.unused)}")
        return "\n".join(lines)


def parse_columns(text: str, roles: Collection[str] = (*ROLES, *ID_NAMES)) -> dict[str, str]:
    """Parse a mapping of roles to columns from the command line.

    >>> parse_columns("prompt=question,responses=answers")
    {'prompt': 'question', 'response': 'answers'}
    >>> parse_columns("promt=question")
    Traceback (most recent call last):
    offbeat.errors.CannotImport: 'promt' is not a role of a column; did you mean 'prompt'?
    """
    given: dict[str, str] = {}
    for pair in filter(None, text.split(",")):
        role, equals, column = (part.strip() for part in pair.partition("="))
        if not equals or not column:
            raise CannotImport(f"the column mapping has {pair!r}; expected pairs like prompt=question")
        role = PLURALS.get(role, role)
        if role not in roles:
            raise CannotImport(f"{role!r} is not a role of a column; {suggest_nearest(role, roles)}")
        given[role] = column
    return given


def detect(rows: Sequence[Row], given: Mapping[str, str] | None = None, kept: Sequence[str] = ()) -> ColumnLayout:
    """Detect the layout of rows. Roles that are not given are detected from the columns' names and values.

    Args:
        rows: The first few rows.
        given: Columns by role. Join several columns that identify a group together with `+`.
        kept: Columns to store with the prompt, for scoring: the reference answer, a difficulty.
    """
    given, names = dict(given or {}), list(dict.fromkeys(name for row in rows for name in row))
    if not given and not kept and {"group_id", "completion_id", "prompt_id", "token_ids", "versions"} <= set(names):
        return ColumnLayout(RowShape.EXPORT, {}, group_by=("group_id",))
    for column in [*(part for name in given.values() for part in name.split("+")), *kept]:
        if column not in names:
            raise CannotImport(f"there is no column {column!r}; {suggest_nearest(column, names)}")
    found = {
        role: given.get(role) or next((name for name in known if name in names and _fits(rows, role, name)), None)
        for role, known in ROLES.items()
    }
    shape = _shape(rows, found, given)
    for role in ("prompt", "response") if shape is RowShape.CONVERSATIONS else ("conversation",):
        found.pop(role)
    columns = {role: column for role, column in found.items() if column is not None}
    if "prompt" not in columns and shape is not RowShape.CONVERSATIONS:
        raise CannotImport(f"no column looks like a prompt among {', '.join(names)}; set one with prompt=…")
    columns, group_by, group_id = _with_ids(rows, columns, given, shape)
    used = {*columns.values(), *group_by, *group_id, *kept}
    unused = tuple(name for name in names if name not in used)
    return ColumnLayout(shape, columns, group_by, group_id, tuple(kept), _kinds(rows, columns, shape), unused)


def _fits(rows: Sequence[Row], role: str, name: str) -> bool:
    """Return False for ids of completions under a name that mostly holds their token ids."""
    firsts = [cell[0] for row in rows if isinstance(cell := row.get(name), list) and cell]
    return role != "response" or not name.endswith("_ids") or not any(isinstance(first, str) for first in firsts)


def _with_ids(
    rows: Sequence[Row], columns: dict[str, str], given: Mapping[str, str], shape: RowShape
) -> tuple[dict[str, str], tuple[str, ...], tuple[str, ...]]:
    """Return the columns with those of ids, the columns that group rows, and those that are the group's own id."""
    prompt, response = (columns.get(role) or columns["conversation"] for role in ("prompt", "response"))
    lists = shape is RowShape.LISTS
    ids = find_ids(rows, given, columns.values(), prompt=prompt, response=response, lists=lists)
    group = tuple(ids.pop("group").split("+")) if "group" in ids else ()
    by_prompt = (ids["prompt_id"],) if "prompt_id" in ids else ()
    # A group of, say, step+prompt has no short name; its id is made from its content.
    return columns | ids, () if lists else group or by_prompt, () if prompt in group else group


def _shape(rows: Sequence[Row], found: Mapping[str, str | None], given: Mapping[str, str]) -> RowShape:
    response, conversation = found["response"], found["conversation"]
    if response is None or ("conversation" in given and "response" not in given):
        if conversation is not None:
            return RowShape.CONVERSATIONS
        names = ", ".join(dict.fromkeys(name for row in rows for name in row))
        raise CannotImport(
            f"no column looks like completions among {names or '(no rows)'}; set one with response=… or conversation=…"
        )
    row = next((row for row in rows if row.get(response)), {})
    return RowShape.LISTS if _is_list_of_completions(row, response, found["reward"]) else RowShape.ROWS


def _is_list_of_completions(row: Row, response: str, reward: str | None) -> bool:
    value = row.get(response)
    kind = cell_kind(value)
    if kind == "messages" and isinstance(value, list):
        # Either one completion of several messages, or several completions of one message each: the rewards decide.
        return isinstance(row.get(reward), list) if reward else response.endswith("s") and len(value) > 1
    return isinstance(value, list) and kind != "token ids"


def _kinds(rows: Sequence[Row], columns: Mapping[str, str], shape: RowShape) -> dict[str, CellKind]:
    """Return how prompts and completions are given in the first rows."""
    found: dict[str, CellKind] = {}
    for role in ("prompt", "response", "conversation"):
        values = [row.get(columns[role]) for row in rows] if role in columns else []
        if role == "response" and shape is RowShape.LISTS:
            values = [part for value in values if isinstance(value, list) for part in value]
        kinds = [kind for value in values if (kind := cell_kind(value)) not in (None, "nothing")]
        if kinds:
            found[role] = kinds[0]
    return found
