"""A group as lines of text, completions side by side, and what keys do. No terminal access here."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Final

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.text import Text

from offbeat.errors import suggest_nearest
from offbeat.experience.ledger import Fate
from offbeat.reports.groups import CompletionView, GroupFilter, GroupView, Range
from offbeat.words import signed, truncate, visible

MIN_COLUMN: Final = 24
"""Least width of a column of text, in terminal cells."""
GAP: Final = " │ "
MAX_TEXT: Final = 20_000
"""Characters of a text that are laid out."""
MAX_PROMPT_LINES: Final = 10
KEYS: Final = "n next  p previous  j down  k up  / search  ? help  q quit"
FILTERS: Final = {
    "/": ("text", "part of a prompt, a column or a completion"),
    "f": ("fate", ", ".join(Fate)),
    "r": ("reward", "mean reward of the group: MIN:MAX"),
    "t": ("task", "its name"),
    "v": ("version", "that generated it: MIN:MAX"),
    "l": ("lag", "when it was trained on: MIN:MAX"),
    "s": ("step", "at which it was trained on: MIN:MAX"),
}
"""The key of each filter, its name and what to type."""
HELP: Final = (
    "n, right    next group           j, down    down a line      space, page down    down a page",
    "p, left     previous group       k, up      up a line        page up             up a page",
    "q           quit                 ?          this help        c                   clear all filters",
    "",
    "Filters: press the key, type a value, press Enter. An empty value removes the filter, Esc keeps it.",
    "A range may have one end: 0.5: or :0.5. One number is both ends. Filters add up.",
    *(f"{key}           {name:8} {hint}" for key, (name, hint) in FILTERS.items()),
)


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


def parse_range(name: str, text: str) -> Range:
    """Parse MIN:MAX; a single number is both ends. Raises `ValueError`.

    >>> parse_range("lag", "4:"), parse_range("lag", "2")
    ((4.0, inf), (2.0, 2.0))
    """
    low, colon, high = text.partition(":")
    try:
        ends = (float(low or -math.inf), float(high or math.inf) if colon else float(low))
    except ValueError:
        raise ValueError(f"{name} {text!r} is not a range; write for example 0.1:0.9, 4: or 0") from None
    if not ends[0] <= ends[1]:
        raise ValueError(f"{name} {text!r} is empty: the first number is larger than the second")
    return ends


def parse_fate(name: str, text: str) -> str:
    """Return the name of a fate. Raises `ValueError` with the nearest one."""
    if text not in set(Fate):
        raise ValueError(f"{name} {text!r} is not a fate; {suggest_nearest(text, map(str, Fate))}")
    return text


def changed(wanted: GroupFilter, name: str, text: str) -> GroupFilter:
    """Return the filter with one value changed, or removed if `text` is empty. Raises `ValueError`.

    >>> changed(GroupFilter(fate="trained"), "reward", "0.5:").reward
    (0.5, inf)
    """
    value: str | Range | None = text or None
    if text and name == "fate":
        value = parse_fate(name, text)
    elif text and name not in ("text", "task"):
        value = parse_range(name, text)
    return replace(wanted, **{name: value})  # type: ignore[arg-type]  # the names are those of FILTERS


@dataclass(frozen=True)
class BrowseState:
    """What the screen shows: a group, the help, or a question for the value of a filter."""

    wanted: GroupFilter
    position: BrowsePosition = field(default_factory=BrowsePosition)
    values: tuple[tuple[str, str], ...] = ()
    """The filters that were typed, as typed."""
    asking: str = ""
    """The name of the filter whose value is being typed."""
    typed: str = ""
    helping: bool = False
    notice: str = ""
    """Why the last value was not taken."""

    def after(self, key: str, *, groups: int, lines: int, room: int) -> "BrowseState | None":
        """Return the state after a key, or None to quit.

        >>> state, sizes = BrowseState(GroupFilter()), {"groups": 2, "lines": 9, "room": 20}
        >>> for key in ("r", "0", ".", "5", "\\n"):
        ...     state = state.after(key, **sizes)
        >>> state.wanted.reward, state.values
        ((0.5, 0.5), (('reward', '0.5'),))
        """
        if self.asking:
            return self._typing(key)
        if self.helping:
            return replace(self, helping=False)
        calm = replace(self, notice="")
        if key == "?":
            return replace(calm, helping=True)
        if key in FILTERS:
            name = FILTERS[key][0]
            return replace(calm, asking=name, typed=dict(self.values).get(name, ""))
        if key == "c":
            return BrowseState(GroupFilter())
        position = self.position.after(key, groups=groups, lines=lines, room=room)
        return None if position is None else replace(calm, position=position)

    def _typing(self, key: str) -> "BrowseState":
        match key:
            case "\n" | "\r":
                return self._apply()
            case "\x1b" | "\x03":
                return replace(self, asking="", typed="", notice="")
            case "\x7f" | "\b":
                return replace(self, typed=self.typed[:-1])
        return replace(self, typed=self.typed + key) if key.isprintable() and len(key) == 1 else self

    def _apply(self) -> "BrowseState":
        text = self.typed.strip()
        try:
            wanted = changed(self.wanted, self.asking, text)
        except ValueError as error:
            return replace(self, asking="", typed="", notice=str(error))
        others = {name: value for name, value in self.values if name != self.asking}
        values = (others | {self.asking: text}) if text else others
        return BrowseState(wanted, values=tuple(values.items()))

    def refused(self, before: "BrowseState") -> "BrowseState":
        """Return the state before a filter that matches no group."""
        new = ", ".join(f"{name} {value}" for name, value in self.values)
        return replace(before, asking="", typed="", notice=f"no group matches {new}")


def status_line(state: BrowseState, *, groups: int, lines: int, room: int, width: int) -> str:
    """Return the last line of the screen: a question or a notice, else the position and the keys, if they fit."""
    if state.asking:
        hint = next(hint for name, hint in FILTERS.values() if name == state.asking)
        return set_cell_size(visible(f"{state.asking} ({hint}): {state.typed}█"), width)
    if state.notice:
        return set_cell_size(visible(state.notice), width)
    top = state.position.top
    more = f", lines {top + 1} to {min(lines, top + room)} of {lines}" if lines > room else ""
    filters = ", ".join(f"{name} {value}" for name, value in state.values)
    text = visible(f"group {state.position.group + 1} of {groups}{more}" + (f"  [{filters}]" if filters else ""))
    keys = next((keys for keys in (KEYS, "? help  q quit") if cell_len(text) + len(keys) + 2 <= width), "")
    return set_cell_size(text, width - len(keys)) + keys
