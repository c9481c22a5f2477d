"""Every kind of event that a run writes, found in the source, with what it tells and what to do.

A kind that is written and not explained here, or explained and not written, is an error: the docs cannot lag the code.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple


class Told(NamedTuple):
    """An event in words."""

    says: str
    do: str = ""


EVENTS: Final = {
    "foretold": Told("before the first step: the memory a step takes, term by term; the largest one has been computed"),
    "resumed": Told("the run goes on from a checkpoint at this step"),
    "worker joined": Told("on Ray: a node has brought a slot, a worker is being started on it"),
    "worker ready": Told("a worker has loaded this version and its probe agrees"),
    "worker mended": Told(
        "an engine was replaced or loaded anew; its prompts went back", "once: nothing. Often: read `why`"
    ),
    "worker lost": Told(
        "a worker ended with an error; its prompts went back, another takes its place",
        "read `why`; three in a row without a group end it",
    ),
    "worker left": Told("on Ray: a node has gone, or its slot", "nothing, if it was meant"),
    "scoring lost": Told(
        "on Ray: a scoring pool ended or fell silent, and is restarted", "look for a reward that hangs"
    ),
    "rank lost": Told(
        "on Ray: a trainer rank ended or fell silent; all ranks end, and the run goes on from the newest checkpoint",
        "often: memory; lower `trainer.token_budget`",
    ),
    "step": Told(
        "a batch was trained: every metric, drift and gates by lag, lags, rewards by version, seconds by phase so far"
    ),
    "waiting": Told(
        "no group has come for a minute or longer; names what is missing and who owes it",
        "look at the workers it names",
    ),
    "published": Told("a version is in the weight log, and why: the first, the period, or drift"),
    "evaluated": Told("pass rates with their intervals, of the prompts that are always the same"),
    "no gradient": Told(
        "nothing in the batch would have moved the policy; it is replaced",
        "often: prompts too easy or too hard, or a gate that stops everything: sync sooner",
    ),
    "refused": Told(
        "groups with log-probs or ratios that are not finite were quarantined; the step goes on without them",
        "look at them: `offbeat view RUN --fate quarantined`",
    ),
    "alarm": Told("a health rule has spoken", "see the alarms above"),
    "released": Told("a paused run goes on: somebody removed the file `pause`"),
    "saved": Told("a checkpoint is being written; `resume` takes the newest that is complete"),
    "failed": Told("the error that ended the run", "read `why`; after mending it, `offbeat resume`"),
    "ended": Told("why the run ended, its books and its time by phase", "books that do not balance are an error"),
}


def written(source: Path) -> dict[str, list[str]]:
    """Kind → its fields, from every `journal.write("kind", step, …)` below `source`."""
    found: dict[str, list[str]] = {}
    for file in sorted(source.rglob("*.py")):
        for call in _writes(ast.parse(file.read_text(encoding="utf-8"))):
            kind = call.args[0]
            assert isinstance(kind, ast.Constant)
            named = [keyword.arg for keyword in call.keywords if keyword.arg]
            fields = found.setdefault(str(kind.value), [])
            fields += [name for name in named if name not in fields]
    return found


def _writes(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "write":
            owner = node.func.value
            name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
            if name == "journal":
                yield node


def rows(source: Path) -> list[list[str]]:
    """A row for each kind, in the order of `EVENTS`: kind, fields, what it says, what to do."""
    kinds = written(source)
    if kinds.keys() != EVENTS.keys():
        raise SystemExit(f"events explained and written differ: {sorted(kinds.keys() ^ EVENTS.keys())}")
    return [
        [f"`{kind}`", ", ".join(f"`{field}`" for field in kinds[kind]) or "–", told.says, told.do or "–"]
        for kind, told in EVENTS.items()
    ]
