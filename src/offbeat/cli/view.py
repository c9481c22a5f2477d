"""`offbeat view`: browse the groups of a run in a terminal."""

import os
import re
import select
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.terminal import plain_errors
from offbeat.reports.working import SOON, Working

if TYPE_CHECKING:
    from offbeat.reports.browse import BrowseState
    from offbeat.reports.groups import GroupFilter, RunGroups

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
    task: Annotated[str | None, typer.Option(help="The name of the task")] = None,
    version: Annotated[str | None, typer.Option(metavar="MIN:MAX", help="Version that generated the group")] = None,
    step: Annotated[str | None, typer.Option(metavar="MIN:MAX", help="Step at which it was trained on")] = None,
    text: Annotated[str | None, typer.Option(help="Part of a prompt, a column or a completion")] = None,
    group: Annotated[list[str] | None, typer.Option(help="The id of a group; can be repeated")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Print all matching groups, for pipes")] = False,
) -> None:
    """Browse groups with completions side by side: `offbeat view runs/one --fate trained --reward 0.1:0.9`.

    Only groups that match all options are shown. A range may have one end: `--lag 4:`.

    Keys: n next group, p previous group, j down, k up, / search, ? all keys and filters, q quit.
    """
    from offbeat.reports.browse import BrowseState

    options = {"fate": fate, "reward": reward, "lag": lag, "length": length, "task": task, "version": version}
    options |= {"step": step, "text": text}
    with plain_errors(code=2), Working("opening the experience log", after=SOON):
        from offbeat.reports.groups import RunGroups
        from offbeat.run.directory import RunDirectory

        wanted = _filter(options, tuple(group or ()))
        directory = RunDirectory(run)
        groups = RunGroups.open(directory, directory.config())
        chosen = groups.select(wanted) if groups else []
        if groups is not None:
            groups.load(chosen[:1])  # imports torch before the screen is cleared
    if groups is None or not chosen:
        typer.echo(f"no group matches: {groups.ledger}" if groups else f"{run} has no experience log yet", err=True)
        raise typer.Exit(1)
    if plain or not (sys.stdout.isatty() and sys.stdin.isatty()):
        _print_all(groups, chosen)
    else:
        values = tuple((name, value) for name, value in options.items() if value)
        _browse(groups, chosen, BrowseState(wanted, values=values))


def _filter(options: "Mapping[str, str | None]", ids: tuple[str, ...]) -> "GroupFilter":
    """Return the filter that the options ask for."""
    from offbeat.reports.browse import changed
    from offbeat.reports.groups import GroupFilter

    wanted = GroupFilter(ids=ids)
    for name, value in options.items():
        try:
            wanted = changed(wanted, name, value) if value is not None else wanted
        except ValueError as error:
            raise typer.BadParameter(f"--{error}") from None
    return wanted


def _print_all(groups: "RunGroups", chosen: Sequence[int]) -> None:
    from offbeat.reports.browse import plain_text

    for start in range(0, len(chosen), 64):
        for group in groups.load(chosen[start : start + 64]):
            typer.echo(plain_text(group) + "\n")


def _browse(groups: "RunGroups", chosen: Sequence[int], state: "BrowseState | None") -> None:
    from rich.console import Console
    from rich.text import Text

    from offbeat.reports.browse import HELP, layout, status_line, wrap

    console = Console()
    with console.screen() as screen, _single_keys() as keys:
        while state is not None:
            width, height = console.size
            room = height - 1
            [group] = groups.load([chosen[state.position.group]])
            lines = layout(group, width)
            top = state.position.top
            shown = lines[top : top + room]
            if state.helping:
                shown = [Text(line) for entry in HELP for line in wrap(entry, width)][:room]
            shown += [Text("")] * (room - len(shown))
            bar = status_line(state, groups=len(chosen), lines=len(lines), room=room, width=width)
            screen.update(Text("\n").join([*shown, Text(bar, "reverse")]))
            key = ""
            while not key and console.size == (width, height):
                key = next(keys)
            after = state.after(key, groups=len(chosen), lines=len(lines), room=room) if key else state
            if after is not None and after.wanted != state.wanted:
                found = groups.select(after.wanted)
                chosen, after = (found, after) if found else (chosen, after.refused(state))
            state = after


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
