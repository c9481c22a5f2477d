"""A group as lines of a terminal, completions side by side, and where the keys lead. Pure: no terminal in here."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.text import Text

from offbeat.report.groups import Answer, Shown
from offbeat.report.words import cut, signed, visible

NARROWEST: Final = 24
"""Columns that a completion needs to be read."""
GAP: Final = " │ "
MOST_TEXT: Final = 20_000
"""Characters of a text that are laid out."""
PROMPT_LINES: Final = 10
KEYS: Final = "n next  p previous  j down  k up  q quit"


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` cells, broken between words where there are any; nothing in them acts on a terminal.

    >>> wrapped("two words\\x1b[2J\\nd", 8), wrapped("日本語", 4)
    (['two ', 'words\\\\x1', 'b[2J', 'd'], ['日本', '語'])
    """
    shown, left_out = cut(text, MOST_TEXT)
    note = f"\n… {left_out:,} more characters" if left_out else ""
    return [part for line in (visible(shown) + note).split("\n") for part in _broken(line, width)]


def _broken(line: str, width: int) -> Iterator[str]:
    current = ""
    for word in re.split(r"(?<= )", line):
        if cell_len((current + word).rstrip(" ")) <= width:
            current += word
            continue
        if current:
            yield set_cell_size(current, min(width, cell_len(current)))
        *whole, current = chop_cells(word, width) if cell_len(word.rstrip(" ")) > width else [word]
        yield from whole
    yield set_cell_size(current, min(width, cell_len(current)))


def facts(group: Shown) -> str:
    """The line above a group."""
    version = "no version of ours" if group.version is None else f"version {group.version}"
    return visible(f"{group.id}  {group.task}  {version}  lag {group.lag}  {group.fate}").replace("\n", " ")


def answer_facts(answer: Answer) -> tuple[str, str]:
    """What a completion earned, and where it comes from."""
    earned = f"{answer.score}  advantage {signed(answer.advantage)}"
    made = f"{answer.tokens} tokens, {answer.finish}  {answer.author}"
    return visible(earned).replace("\n", " "), visible(made).replace("\n", " ")


def laid_out(group: Shown, width: int) -> list[Text]:
    """A group for a terminal of this width."""
    lines = [Text(line, "bold") for line in wrapped(facts(group), width)]
    lines += _folded([Text(line) for line in wrapped(group.prompt, width)])
    known = "  ".join(f"{name}: {value}" for name, value in group.columns.items() if name != "prompt")
    lines += [Text(line, "dim") for line in wrapped(known, width)] if known else []
    lines.append(Text("─" * width, "dim"))
    most = max(1, (width + len(GAP)) // (NARROWEST + len(GAP)))
    rows = max(1, math.ceil(len(group.answers) / most))
    beside = max(1, math.ceil(len(group.answers) / rows))  # as even as can be
    room = (width - (beside - 1) * len(GAP)) // beside
    for start in range(0, len(group.answers), beside):
        columns = [_column(one, room) for one in group.answers[start : start + beside]]
        lines += [_joined(row, room) for row in zip_longest(*columns)]
        lines.append(Text(""))
    return lines[:-1] if group.answers else lines


def _folded(lines: list[Text]) -> list[Text]:
    """A long prompt by its beginning and its end: the completions are what a person came for."""
    left_out = len(lines) - PROMPT_LINES
    if left_out <= 0:
        return lines
    half = PROMPT_LINES // 2
    return [*lines[:half], Text(f"… {left_out} lines left out; --plain has them", "dim"), *lines[-half:]]


def _column(answer: Answer, width: int) -> list[Text]:
    good = answer.advantage is not None and answer.advantage > 0
    earned, made = answer_facts(answer)
    lines = [Text(line, "bold green" if good else "bold yellow") for line in wrapped(earned, width)]
    lines += [Text(line, "dim") for line in wrapped(made, width)]
    return lines + [Text(line) for line in wrapped(answer.text, width)]


def _joined(row: Sequence[Text | None], width: int) -> Text:
    line = Text()
    for place, cell in enumerate(row):
        if place:
            line.append(GAP, "dim")
        shown = cell if cell is not None else Text("")
        line.append(set_cell_size(shown.plain, width), shown.style)
    return line


def plainly_told(group: Shown) -> str:
    """A group for a pipe: whole lines, nothing side by side.

    >>> one = Answer("42", 1.0, "1", 0.5, 2, "stop", "v3")
    >>> print(plainly_told(Shown("g7", "sums", "17+25=", {}, "trained at step 4", 3, (0,), (one,))))
    g7  sums  version 3  lag 0  trained at step 4
        17+25=
      1  advantage +0.50  2 tokens, stop  v3
        42
    """
    lines = [facts(group), *_indented(group.prompt)]
    lines += [f"    {visible(f'{name}: {value}')}" for name, value in group.columns.items() if name != "prompt"]
    for answer in group.answers:
        lines += ["  " + "  ".join(answer_facts(answer)), *_indented(answer.text)]
    return "\n".join(lines)


def _indented(text: str) -> list[str]:
    shown, left_out = cut(text, MOST_TEXT)
    note = f"\n… {left_out:,} more characters" if left_out else ""
    return [f"    {line}" for line in (visible(shown) + note).split("\n")]


@dataclass(frozen=True)
class Place:
    """Where a person is: which group, and its first line on the screen."""

    group: int = 0
    top: int = 0

    def after(self, key: str, *, groups: int, lines: int, room: int) -> "Place | None":
        """Where a key leads, among so many groups, in a group of so many lines of which `room` fit; None is out.

        >>> Place().after("n", groups=2, lines=40, room=20), Place(1).after("n", groups=2, lines=40, room=20)
        (Place(group=1, top=0), Place(group=1, top=0))
        >>> Place().after(" ", groups=2, lines=50, room=20), Place().after("q", groups=2, lines=50, room=20)
        (Place(group=0, top=19), None)
        """
        match key:
            case "q" | "\x03" | "\x04":
                return None
            case "n" | "\x1b[C":
                return Place(min(self.group + 1, groups - 1)) if self.group + 1 < groups else self
            case "p" | "\x1b[D":
                return Place(self.group - 1) if self.group else self
        down = {"j": 1, "\x1b[B": 1, "k": -1, "\x1b[A": -1, " ": room - 1, "\x1b[6~": room - 1, "\x1b[5~": 1 - room}
        return Place(self.group, max(0, min(self.top + down.get(key, 0), lines - room)))


def status(place: Place, *, groups: int, lines: int, room: int, width: int) -> str:
    """The last line of the screen."""
    more = f", lines {place.top + 1} to {min(lines, place.top + room)} of {lines}" if lines > room else ""
    full = f"group {place.group + 1} of {groups}{more}"
    return full + " " * max(2, width - len(full) - len(KEYS)) + KEYS if len(full) + len(KEYS) + 2 <= width else full
