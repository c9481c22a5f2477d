"""What other tools call our settings, and the setting that somebody meant by a name that we do not have. No torch.

`synonyms.toml` has the names of TRL, verl, OpenRLHF and prime-rl, and words of habit such as lr. An unknown key is
looked up, in this order, as:

1. a name of another tool, with or without the table that it stands in: `lr`, `optimizer.lr`, `trainer.lr`
2. a setting of another table: `learning_rate`
3. the end of a longer name of another tool: `rollout.n` of `actor_rollout_ref.rollout.n`
4. a slip of the pen: `promts_per_step`, `groupsize`
"""

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from importlib.resources import files
from typing import Final

from offbeat.config.knobs import knobs
from offbeat.errors import suggest_nearest

PREFERRED: Final = ("sampling", "run", "sync")
"""Where a name that several tables have belongs, if it stands alone: `temperature` is that of sampling, `mode` that of
the run, `every` that of sync. After these, the first table of the configuration."""
SIMILAR: Final = 0.75
"""Names at least this similar count as the same name mistyped."""


@dataclass(frozen=True)
class Synonym:
    """A name of another tool.

    >>> synonyms()["beta"]
    Synonym(tool='trl', name='beta', setting='objective.kl_coefficient', note='')
    """

    tool: str
    name: str
    setting: str
    """The nearest setting; empty if there is none."""
    note: str
    """What differs; empty if the setting takes the same value."""

    def hint(self) -> str:
        """Return what to write instead, as part of a message."""
        meant = f"did you mean {self.setting!r}?" if self.setting else "there is no such setting here."
        return f"{meant} {self.note}".rstrip()


@cache
def synonyms() -> Mapping[str, Synonym]:
    """Return all synonyms by name, in the order of the file."""
    tools = tomllib.loads(files("offbeat.config").joinpath("synonyms.toml").read_text(encoding="utf-8"))
    found: dict[str, Synonym] = {}
    for tool, names in tools.items():
        for name, meaning in names.items():
            setting, note = (meaning, "") if isinstance(meaning, str) else meaning
            found[name] = Synonym(tool, name, setting, note)
    return found


def place(name: str) -> str | None:
    """Return the setting that takes the value of `name`, or None if there is none or its value means something else.

    >>> place("learning_rate"), place("lr"), place("temperature"), place("sync.every")
    ('optimizer.learning_rate', 'optimizer.learning_rate', 'sampling.temperature', 'sync.every')
    >>> place("epsilon")  # of TRL: the clip, which is a pair here
    """
    if name in _tables():
        return name
    if (synonym := synonyms().get(name)) is not None:
        return synonym.setting if synonym.setting and not synonym.note else None
    return next(iter(_settings_called(name)), None)


def suggest_setting(key: str) -> str:
    """Return a hint for a key that is not a setting.

    >>> suggest_setting("optimizer.lr")
    "did you mean 'optimizer.learning_rate'?"
    >>> suggest_setting("actor_rollout_ref.rollout.n")
    "did you mean 'group_size'?"
    """
    if (synonym := _synonym_of(key)) is not None:
        return synonym.hint()
    table, _, name = key.rpartition(".")
    if same := _settings_called(name, near=table):
        return f"did you mean {' or '.join(map(repr, same))}?"
    if (synonym := _longer_synonym(key)) is not None:
        return synonym.hint()
    if (meant := nearest(key)) is not None:
        return synonyms()[meant].hint() if meant in synonyms() else f"did you mean {meant!r}?"
    valid = [known.rpartition(".")[2] for known in _tables() if known.rpartition(".")[0] == table]
    return suggest_nearest(name, valid or [known for known in _tables() if "." not in known])


@cache
def _tables() -> tuple[str, ...]:
    """Return every setting and the name of every table, in the order of the configuration."""
    found: dict[str, None] = {}
    for key in knobs():
        parts = key.split(".")
        found |= dict.fromkeys(".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return tuple(found)


def _settings_called(name: str, *, near: str = "") -> list[str]:
    """Return the settings of this name in any table: the one whose table is most like `near` first."""
    found = [key for key in knobs() if key.rpartition(".")[2] == name]

    def order(key: str) -> tuple[float, int]:
        table = key.rpartition(".")[0]
        likeness = _likeness(near, table) if near else 0.0
        return -likeness if likeness >= SIMILAR else 0.0, PREFERRED.index(table) if table in PREFERRED else 9

    return sorted(found, key=order)


def _synonym_of(key: str) -> Synonym | None:
    """Return the synonym that is the whole key, or else the longest end of it."""
    parts = key.split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    return next((synonyms()[end] for end in ends if end in synonyms()), None)


def _longer_synonym(key: str) -> Synonym | None:
    return next((synonym for name, synonym in synonyms().items() if name.endswith(f".{key}")), None)


def nearest(key: str) -> str | None:
    """Return the setting or synonym that is most like the key, or None if none is similar."""
    table, _, name = key.rpartition(".")
    scores = {known: _score(name, known.rpartition(".")[2], table == known.rpartition(".")[0]) for known in _known()}
    scores |= {known: max(scores[known], _score(key, known, False)) for known in _known() if "." in known}
    best = max(scores, key=lambda known: scores[known])
    return best if scores[best] >= SIMILAR else None


def _known() -> Iterable[str]:
    return (*_tables(), *(name for name in synonyms() if name not in _tables()))


def _score(name: str, known: str, same_table: bool) -> float:
    likeness = _likeness(name, known)
    # Swapped letters are the likeliest slip, and a slip keeps its table.
    return likeness and likeness + 0.1 * (sorted(name) == sorted(known)) + 0.1 * same_table


def _likeness(one: str, other: str) -> float:
    """Return how alike two names are, from 0 to 1; case, dots, dashes and underscores do not count."""
    first, second = _letters(one), _letters(other)
    common = (Counter(first) & Counter(second)).total()
    if 2 * common < (SIMILAR - 0.1) * (len(first) + len(second)):  # too few letters in common, in any order
        return 0.0
    return SequenceMatcher(None, first, second, autojunk=False).ratio()


@cache
def _letters(name: str) -> str:
    return re.sub(r"[._-]", "", name.casefold())
