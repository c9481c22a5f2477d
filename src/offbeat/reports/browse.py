"""A group as lines of text, completions side by side, and how keys move the view. No terminal access here."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.text import Text

from offbeat.reports.groups import CompletionView, GroupView
from offbeat.reports.words import signed, truncate, visible

MIN_COLUMN: Final = 24
"""Least width of a column of text, in terminal cells."""
GAP: Final = " │ "
MAX_TEXT: Final = 20_000
"""Characters of a text that are laid out."""
MAX_PROMPT_LINES: Final = 10
KEYS: Final = "n next  p previous  j down  k up  q quit"


def wrap(text: str, width: int) -> list[str]:
    """Break text into lines of at most `width` cells, between words if possible. Control characters are escaped.

    >>> wrap("two words\\x1b[2J\\nd", 8), wrap("日本語", 4)
    (['two ', 'words\\\\x1', 'b[2J', 'd'], ['日本', '語'])
    """
    return [part for line in _safe_lines(text) for part in _break_line(line, width)]


def _safe_lines(text: str) -> list[str]:
    shown, removed = truncate(text, MAX_TEXT)
    note = f"\n… {removed:,} more characters" if removed else ""
    return (visible(shown) + note).split("\n")


def _break_line(line: str, width: int) -> Iterator[str]:
    current = ""
    for word in re.split(r"(?<= )", line):
        if cell_len((current + word).rstrip(" ")) <= width:
            current += word
            continue
        if current:
            yield set_cell_size(current, min(width, cell_len(current)))
        *full, current = chop_cells(word, width) if cell_len(word.rstrip(" ")) > width else [word]
        yield from full
    yield set_cell_size(current, min(width, cell_len(current)))


def group_header(group: GroupView) -> str:
    """Return the line above a group: id, task, version, lag and fate."""
    version = "no version" if group.version is None else f"version {group.version}"
    return _one_line(f"{group.id}  {group.task}  {version}  lag {group.lag}  {group.fate}")


def completion_headers(completion: CompletionView) -> tuple[str, str]:
    """Return two lines for a completion: score with advantage, and length with author."""
    score = f"{completion.score}  advantage {signed(completion.advantage)}"
    return _one_line(score), _one_line(f"{completion.tokens} tokens, {completion.finish}  {completion.author}")


def _one_line(text: str) -> str:
    return visible(text).replace("\n", " ")


def layout(group: GroupView, width: int) -> list[Text]:
    """Return a group as styled lines for a terminal of this width."""
    lines = [Text(line, "bold") for line in wrap(group_header(group), width)]
    lines += _shorten_prompt([Text(line) for line in wrap(group.prompt, width)])
    columns = "  ".join(f"{name}: {value}" for name, value in group.columns.items() if name != "prompt")
    lines += [Text(line, "dim") for line in wrap(columns, width)] if columns else []
    lines.append(Text("─" * width, "dim"))
    count = len(group.completions)
    most = max(1, (width + len(GAP)) // (MIN_COLUMN + len(GAP)))
    rows = max(1, math.ceil(count / most))
    per_row = max(1, math.ceil(count / rows))  # spread evenly over the rows
    column_width = (width - (per_row - 1) * len(GAP)) // per_row
    for start in range(0, count, per_row):
        row = [_column(one, column_width) for one in group.completions[start : start + per_row]]
        lines += [_join_cells(cells, column_width) for cells in zip_longest(*row)]
        lines.append(Text(""))
    return lines[:-1] if count else lines


def _shorten_prompt(lines: list[Text]) -> list[Text]:
    """Keep the beginning and the end of a long prompt, so that its completions fit on the screen."""
    removed = len(lines) - MAX_PROMPT_LINES
    if removed <= 0:
        return lines
    half = MAX_PROMPT_LINES // 2
    return [*lines[:half], Text(f"… {removed} lines not shown; --plain shows all", "dim"), *lines[-half:]]


def _column(completion: CompletionView, width: int) -> list[Text]:
    good = completion.advantage is not None and completion.advantage > 0
    score, origin = completion_headers(completion)
    lines = [Text(line, "bold green" if good else "bold yellow") for line in wrap(score, width)]
    lines += [Text(line, "dim") for line in wrap(origin, width)]
    return lines + [Text(line) for line in wrap(completion.text, width)]


def _join_cells(cells: Sequence[Text | None], width: int) -> Text:
    line = Text()
    for number, cell in enumerate(cells):
        if number:
            line.append(GAP, "dim")
        shown = cell if cell is not None else Text("")
        line.append(set_cell_size(shown.plain, width), shown.style)
    return line


def plain_text(group: GroupView) -> str:
    """Return a group as plain lines for a pipe, one completion after the other.

    >>> one = CompletionView("42", "1", 0.5, 2, "stop", "v3")
    >>> print(plain_text(GroupView("g7", "sums", "17+25=", {}, "trained at step 4", 3, (0,), (one,))))
    g7  sums  version 3  lag 0  trained at step 4
        17+25=
      1  advantage +0.50  2 tokens, stop  v3
        42
    """
    lines = [group_header(group), *_indent(group.prompt)]
    lines += [f"    {visible(f'{name}: {value}')}" for name, value in group.columns.items() if name != "prompt"]
    for completion in group.completions:
        lines += ["  " + "  ".join(completion_headers(completion)), *_indent(completion.text)]
    return "\n".join(lines)


def _indent(text: str) -> list[str]:
    return [f"    {line}" for line in _safe_lines(text)]


@dataclass(frozen=True)
class BrowsePosition:
    """Which group is on the screen, and its first visible line."""

    group: int = 0
    top: int = 0

    def after(self, key: str, *, groups: int, lines: int, room: int) -> "BrowsePosition | None":
        """Return the position after a key, or None to quit. `room` of the group's `lines` fit on the screen.

        >>> first, last = BrowsePosition(0), BrowsePosition(1)
        >>> first.after("n", groups=2, lines=40, room=20) == last == last.after("n", groups=2, lines=40, room=20)
        True
        >>> first.after(" ", groups=2, lines=50, room=20), first.after("q", groups=2, lines=50, room=20)
        (BrowsePosition(group=0, top=19), None)
        """
        match key:
            case "q" | "\x03" | "\x04":
                return None
            case "n" | "\x1b[C":
                return BrowsePosition(self.group + 1) if self.group + 1 < groups else self
            case "p" | "\x1b[D":
                return BrowsePosition(self.group - 1) if self.group else self
        moves = {"j": 1, "\x1b[B": 1, "k": -1, "\x1b[A": -1, " ": room - 1, "\x1b[6~": room - 1, "\x1b[5~": 1 - room}
        return BrowsePosition(self.group, max(0, min(self.top + moves.get(key, 0), lines - room)))


def status_line(position: BrowsePosition, *, groups: int, lines: int, room: int, width: int) -> str:
    """Return the last line of the screen: the position, and the keys if they fit."""
    top = position.top
    more = f", lines {top + 1} to {min(lines, top + room)} of {lines}" if lines > room else ""
    text = f"group {position.group + 1} of {groups}{more}"
    return text + " " * max(2, width - len(text) - len(KEYS)) + KEYS if len(text) + len(KEYS) + 2 <= width else text
