"""`offbeat view`: browse the groups of a run in a terminal."""

import math
import os
import re
import select
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.terminal import plain_errors

if TYPE_CHECKING:
    from rich.console import Console

    from offbeat.reports.groups import RunGroups

KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|.", re.DOTALL)
"""One key press; an arrow key sends several characters."""
RESIZE_SECONDS = 0.5
"""How often the terminal size is checked while no key is pressed."""


def view(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory")],
    fate: Annotated[str | None, typer.Option(help="trained, waiting, zero-variance, expired …")] = None,
    reward: Annotated[str | None, typer.Option(metavar="MIN:MAX", help="Mean reward of the group")] = None,
    lag: Annotated[str | None, typer.Option(metavar="MIN:MAX", help="Lag when the group was trained on")] = None,
    length: Annotated[str | None, typer.Option(metavar="MIN:MAX", help="Tokens in the longest completion")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Print all matching groups, for pipes")] = False,
) -> None:
    """Browse groups with completions side by side: `offbeat view runs/one --fate trained --reward 0.1:0.9`.

    Only groups that match all options are shown. A range may have one end: `--lag 4:`.

    Keys: n next group, p previous group, j down, k up, q quit.
    """
    from rich.console import Console

    from offbeat.reports.groups import GroupFilter, RunGroups
    from offbeat.run.directory import RunDirectory

    wanted = GroupFilter(_fate(fate), _range("--reward", reward), _range("--lag", lag), _range("--length", length))
    with plain_errors(code=2):
        directory = RunDirectory(run)
        groups = RunGroups.open(directory, directory.config())
        chosen = groups.select(wanted) if groups else []
    if groups is None or not chosen:
        typer.echo(f"no group matches: {groups.ledger}" if groups else f"{run} has no experience log yet", err=True)
        raise typer.Exit(1)
    console = Console()
    if plain or not (console.is_terminal and sys.stdin.isatty()):
        _print_all(groups, chosen)
    else:
        _browse(groups, chosen, console)


def _range(name: str, text: str | None) -> tuple[float, float] | None:
    """Parse MIN:MAX; a single number is both ends."""
    if text is None:
        return None
    low, colon, high = text.partition(":")
    try:
        ends = (float(low or -math.inf), float(high or math.inf) if colon else float(low))
    except ValueError:
        raise typer.BadParameter(f"{name} {text!r} is not a range; write for example 0.1:0.9, 4: or 0") from None
    if not ends[0] <= ends[1]:
        raise typer.BadParameter(f"{name} {text!r} is empty: the first number is larger than the second")
    return ends


def _fate(name: str | None) -> str | None:
    from offbeat.errors import suggest_nearest
    from offbeat.experience.ledger import Fate

    if name is not None and name not in set(Fate):
        raise typer.BadParameter(f"--fate {name!r} is not a fate; {suggest_nearest(name, map(str, Fate))}")
    return name


def _print_all(groups: "RunGroups", chosen: Sequence[int]) -> None:
    from offbeat.reports.browse import plain_text

    for start in range(0, len(chosen), 64):
        for group in groups.load(chosen[start : start + 64]):
            typer.echo(plain_text(group) + "\n")


def _browse(groups: "RunGroups", chosen: Sequence[int], console: "Console") -> None:
    from rich.text import Text

    from offbeat.reports.browse import BrowsePosition, layout, status_line

    position: BrowsePosition | None = BrowsePosition()
    groups.load(chosen[:1])  # imports torch before the screen is cleared
    with console.screen() as screen, _single_keys() as keys:
        while position is not None:
            width, height = console.size
            [group] = groups.load([chosen[position.group]])
            lines, room = layout(group, width), height - 1
            shown = lines[position.top : position.top + room]
            shown += [Text("")] * (room - len(shown))
            bar = status_line(position, groups=len(chosen), lines=len(lines), room=room, width=width)
            screen.update(Text("\n").join([*shown, Text(bar, "reverse")]))
            key = ""
            while not key and console.size == (width, height):
                key = next(keys)
            position = position.after(key, groups=len(chosen), lines=len(lines), room=room)


@contextmanager
def _single_keys() -> Iterator[Iterator[str]]:
    """Yield an iterator of key presses, with an empty one when none comes. Restores the terminal afterwards."""
    import termios
    import tty

    source = sys.stdin.fileno()
    before = termios.tcgetattr(source)

    def pressed() -> Iterator[str]:
        while True:
            ready, _, _ = select.select([source], [], [], RESIZE_SECONDS)
            if not ready:
                yield ""
            elif read := os.read(source, 64):
                yield from KEY.findall(read.decode(errors="replace"))
            else:
                yield "q"

    try:
        tty.setcbreak(source)
        yield pressed()
    finally:
        termios.tcsetattr(source, termios.TCSADRAIN, before)
