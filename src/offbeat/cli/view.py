"""`offbeat view`: look at the groups of a run."""

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

    from offbeat.report.groups import RunGroups

KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|.", re.DOTALL)
"""An arrow sends several characters."""
LOOK_AGAIN = 0.5
"""Seconds between looks at the terminal's size while no key is pressed."""


def view(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory")],
    fate: Annotated[str | None, typer.Option(help="trained, waiting, zero-variance, expired …")] = None,
    reward: Annotated[str | None, typer.Option(metavar="MIN:MAX", help="Mean reward of the group")] = None,
    lag: Annotated[str | None, typer.Option(metavar="MIN:MAX", help="When it was trained on")] = None,
    length: Annotated[str | None, typer.Option(metavar="MIN:MAX", help="Tokens of its longest completion")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Write all of them out, for pipes")] = False,
) -> None:
    """Browse groups, completions side by side: `offbeat view runs/one --fate trained --reward 0.1:0.9`.

    A range may leave out an end: `--lag 4:`. Keys: n and p for the next and previous group, j and k to scroll, q to
    quit.
    """
    from rich.console import Console

    from offbeat.report.groups import RunGroups, Wanted
    from offbeat.run.directory import RunDirectory

    wanted = Wanted(_fate(fate), *(_range(name, text) for name, text in _named(reward, lag, length)))
    with plain_errors(code=2):
        directory = RunDirectory(run)
        groups = RunGroups.of(directory, directory.config())
        chosen = groups.choose(wanted) if groups else []
    if groups is None or not chosen:
        typer.echo(f"no group fits: {groups.ledger}" if groups else f"{run} has no experience log yet", err=True)
        raise typer.Exit(1)
    console = Console()
    if plain or not (console.is_terminal and sys.stdin.isatty()):
        _write_out(groups, chosen)
    else:
        _browse(groups, chosen, console)


def _named(reward: str | None, lag: str | None, length: str | None) -> list[tuple[str, str | None]]:
    return [("--reward", reward), ("--lag", lag), ("--length", length)]


def _range(name: str, text: str | None) -> tuple[float, float] | None:
    """Both ends; one number is both."""
    if text is None:
        return None
    low, colon, high = text.partition(":")
    try:
        ends = (float(low or -math.inf), float(high or math.inf) if colon else float(low))
    except ValueError:
        raise typer.BadParameter(f"{name} {text!r} is not a range; write 0.1:0.9, 4: or 0") from None
    if not ends[0] <= ends[1]:
        raise typer.BadParameter(f"{name} {text!r} holds nothing: its first end is above its second")
    return ends


def _fate(name: str | None) -> str | None:
    from offbeat.errors import nearest
    from offbeat.experience.ledger import Fate

    if name is not None and name not in set(Fate):
        raise typer.BadParameter(f"--fate {name!r} is not a fate; {nearest(name, [fate.value for fate in Fate])}")
    return name


def _write_out(groups: "RunGroups", chosen: Sequence[int]) -> None:
    from offbeat.report.browse import plainly_told

    for start in range(0, len(chosen), 64):
        for group in groups.show(chosen[start : start + 64]):
            typer.echo(plainly_told(group) + "\n")


def _browse(groups: "RunGroups", chosen: Sequence[int], console: "Console") -> None:
    from rich.text import Text

    from offbeat.report.browse import Place, laid_out, status

    place: Place | None = Place()
    groups.show(chosen[:1])  # torch is loaded before the screen is cleared, not after
    with console.screen() as screen, _single_keys() as keys:
        while place is not None:
            width, height = console.size
            [group] = groups.show([chosen[place.group]])
            lines, room = laid_out(group, width), height - 1
            shown = lines[place.top : place.top + room]
            shown += [Text("")] * (room - len(shown))
            bar = status(place, groups=len(chosen), lines=len(lines), room=room, width=width)
            screen.update(Text("\n").join([*shown, Text(bar, "reverse")]))
            key = ""
            while not key and console.size == (width, height):
                key = next(keys)
            place = place.after(key, groups=len(chosen), lines=len(lines), room=room)


@contextmanager
def _single_keys() -> Iterator[Iterator[str]]:
    """Keys as they are pressed, and an empty one now and then; the terminal is as before afterwards."""
    import termios
    import tty

    source = sys.stdin.fileno()
    before = termios.tcgetattr(source)

    def pressed() -> Iterator[str]:
        while True:
            ready, _, _ = select.select([source], [], [], LOOK_AGAIN)
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
