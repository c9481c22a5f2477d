"""What a run gives: `offbeat report` its curves, `offbeat view` its answers, `offbeat export` its model."""

import os
import re
import select
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from offbeat.cli.terminal import plain_errors, printable
from offbeat.working import SOON, Working

if TYPE_CHECKING:
    from offbeat.reports.browse import BrowseState
    from offbeat.reports.groups import GroupFilter, RunGroups


def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run directories, or NAME=directory")],
    out: Annotated[Path | None, typer.Option(help="The file to write; default: report.html in the run")] = None,
    name: Annotated[
        list[str] | None, typer.Option(help="A name for each run, or for each configuration, in their order")
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="Serve the report on this machine, and update it")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port of --live; 0: a free one")] = 0,
) -> None:
    """Write an HTML report about one run, or a comparison of several: `offbeat report runs/one`.

    Works while a run is running; `--live` keeps the page up to date. Runs that differ only in their seed are pooled:
    `offbeat report runs/lag4-seed* runs/lag0-seed* --name lag4 --name lag0 --out lag.html`
    """
    from offbeat.reports.comparison import split_name

    named, paths = zip(*map(split_name, runs), strict=True)
    names = name or (named if any(named) else [])
    if (live and out is not None) or (port and not live):
        typer.echo(
            "--live serves the report and writes no file: give --out or --live; --port belongs to --live", err=True
        )
        raise typer.Exit(2)
    if live:
        _serve(paths, names, port)
        return
    _write(paths, names, out or (paths[0] / "report.html" if len(paths) == 1 else Path("report.html")))


def _write(paths: Sequence[Path], names: Sequence[str], to: Path) -> None:
    from offbeat.reports.page import write_report

    with plain_errors(code=2):
        conclusion = write_report(paths, to, names)
    typer.echo(printable(conclusion))
    typer.echo(f"written to {to}")


def _serve(paths: Sequence[Path], names: Sequence[str], port: int) -> None:
    from offbeat.reports.page import load_runs
    from offbeat.reports.serve import ReportServer, ReportSource

    with plain_errors(code=2):
        load_runs(paths, names)  # a wrong directory is an error here, not in the browser
        server = ReportServer(ReportSource(paths, names), port)
    with server:
        try:
            typer.echo(f"live report: {server.url}\nIt is served to this machine only; Ctrl-C ends it.")
            server.serve_forever()
        except KeyboardInterrupt:
            again = " ".join(map(str, paths))
            typer.echo(printable(f"\nThe live report has ended. To keep a copy: offbeat report {again}"))


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


def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint directory, or a run directory to export its newest checkpoint")
    ],
    out: Annotated[Path, typer.Argument(help="The directory to write; must be new or empty")],
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="The type to write; default: bfloat16. float32 holds the values that were served"),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Directory of the tokenizer; default: `tokenizer` in the run directory")
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge an adapter into its base and write whole weights")
    ] = False,
    base: Annotated[
        Path | None, typer.Option(help="Directory of an adapter's base; default: the model of the run's configuration")
    ] = None,
) -> None:
    """Write the policy model for transformers, vLLM and others: `offbeat export runs/one out`.

    Every byte of the checkpoint is verified first. The policy of a run with an adapter is written as a directory of
    peft, or with `--merge` as a whole model; both are loaded again and compared with the trainer's log-probs.
    """
    with plain_errors(), Working("loading torch") as working:
        import torch

        from offbeat.trainer.export import export as write

        dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
        rounded = None if dtype is None else dtypes[dtype]
        working.next("verifying the checkpoint and writing the model")
        made = write(checkpoint, out, dtype=rounded, tokenizer=tokenizer, merge=merge, base=base)
    adapter = made.manifest.adapter is not None
    how = "as an adapter" if adapter and not merge else f"in {dtype or 'bfloat16'}"
    checked = "; it computes the log-probs of the trainer" if adapter else ""
    typer.echo(f"step {made.step} of {printable(str(made.folder))} written {how} to {printable(str(out))}{checked}")
