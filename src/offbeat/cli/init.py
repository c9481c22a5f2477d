"""`offbeat init`: write a configuration file in which a comment explains every setting."""

import re
import textwrap
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.errors import suggest_nearest

if TYPE_CHECKING:
    from offbeat.config.knobs import Knob


def init(
    recipe: Annotated[str | None, typer.Argument(help="A recipe; without one, all are listed")] = None,
    out: Annotated[Path, typer.Option(help="The file to write")] = Path("run.toml"),
) -> None:
    """Write a commented configuration file from a recipe: `offbeat init quickstart --out run.toml`."""
    found = recipes()
    if recipe is None:
        for text in found.values():
            typer.echo(text.partition("\n")[0].removeprefix("# "))
        typer.echo("\nwrite one with `offbeat init NAME`, then `offbeat check run.toml` and `offbeat train run.toml`")
        return
    if recipe not in found:
        raise typer.BadParameter(f"{recipe!r} is not a recipe; {suggest_nearest(recipe, found)}")
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(annotated(found[recipe]))
    except FileExistsError:
        raise typer.BadParameter(f"{out} already exists; choose another name with --out") from None
    except OSError as error:
        raise typer.BadParameter(f"{out} cannot be written: {error}") from error
    typer.echo(f"{out} written; next: `offbeat check {out}`")


def recipes() -> dict[str, str]:
    """Return the text of the recipes that come with offbeat, by name."""
    place = files("offbeat").joinpath("recipes")
    names = sorted(entry.name.removesuffix(".toml") for entry in place.iterdir() if entry.name.endswith(".toml"))
    return {name: place.joinpath(f"{name}.toml").read_text(encoding="utf-8") for name in names}


def annotated(text: str) -> str:
    """Return a recipe with a comment above every setting.

    >>> print(annotated("[sampling]\\ntop_k = 0"))
    [sampling]
    # 0 samples from the whole distribution. More than 0 works only with objectives without behavior log-probs. (a
    # whole number, at least 0; default 0)
    top_k = 0
    """
    from offbeat.config.knobs import knobs

    lines: list[str] = []
    table = ""
    for line in text.split("\n"):
        if header := re.match(r"\[([\w.]+)\]", line):
            table = header[1] + "."
        elif setting := re.match(r"(\w+) = ", line):
            lines += _comment(knobs()[table + setting[1]])
        lines.append(line)
    return "\n".join(lines)


def _comment(knob: "Knob") -> list[str]:
    default = f"; default {knob.default}" if knob.default not in ("", '""', "{}") else ""
    lines = textwrap.wrap(f"{knob.meaning} ({knob.kind}{default})", 108, break_on_hyphens=False)
    return [f"# {line}" for line in lines]
