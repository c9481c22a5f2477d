"""Which columns hold the user's own ids: of groups, of prompts, and of completions.

Names such as `id` mean different things in different files. They are decided by the first rows: an id that occurs with
two different completions does not name a completion.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from offbeat.experience.importing.records import Row

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
