"""Check that the commands in the docs exist, with their options and arguments. Nothing is run.

A command of offbeat is parsed as the command line would parse it. A script of the repository must exist and contain its
options. Other programs must be in the list `OTHERS`.
"""

import re
import shlex
import tomllib
from collections.abc import Iterator
from typing import Final

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from lab.figures import ROOT
from offbeat.cli.main import app

OTHERS: Final = frozenset({"apt-get", "cat", "cd", "chmod", "export", "git", "hf", "python", "ray", "source"})
"""Programs of others that the docs may use; their options are not checked."""


def commands(block: str) -> Iterator[str]:
    """Yield the command lines of a shell block: continued lines joined, comments and prompts removed.

    >>> list(commands("# first\\noffbeat init  # lists\\n$ offbeat log \\\\\\n    stats L"))
    ['offbeat init', 'offbeat log stats L']
    """
    for line in re.sub(r"\\\n\s*", "", block).splitlines():
        plain = re.sub(r"(^|\s)#.*$", "", line).strip().removeprefix("$ ")
        yield from filter(None, re.split(r"\s*(?:&&|\|\|)\s*", plain))


def faults(line: str) -> list[str]:
    """Return what is wrong with a command line: an empty list if it could be typed.

    >>> faults("offbeat train run.toml --set sync.every=10"), faults("offbeat log stats runs/one/experience")
    ([], [])
    >>> faults("offbeat train run.toml --out-dir x")
    ["'offbeat train run.toml --out-dir x': No such option: --out-dir"]
    >>> faults("python -m lab.nothing"), faults("frobnicate")
    (["'python -m lab.nothing': lab/nothing.py does not exist"], ["'frobnicate': frobnicate is not a known program"])
    """
    words = shlex.split(line)
    says = []
    if words[0] == "offbeat":
        says = _offbeat(words[1:])
    elif words[0].endswith("pip") or words[:3] == ["python", "-m", "pip"]:
        says = _extras(line)
    elif words[:2] == ["python", "-m"] and words[2].startswith("lab."):
        says = _script(words[2].replace(".", "/") + ".py", words[3:])
    elif words[0] == "python" and not words[1].startswith("-"):
        says = _script(words[1], words[2:])
    elif "/" in words[0]:
        says = _script(words[0], words[1:])
    elif words[0] not in OTHERS:
        says = [f"{words[0]} is not a known program"]
    return [f"{line!r}: {one}" for one in says]


def _offbeat(words: list[str]) -> list[str]:
    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="offbeat")
    while isinstance(command, TyperGroup) and words and not words[0].startswith("-"):
        found = command.get_command(context, words[0])
        if found is None:
            return [f"there is no command {words[0]}"]
        command, words = found, words[1:]
    try:
        command.make_context(command.name, list(words), parent=context)
    except TyperException as error:
        return [str(error)]
    return []


def _extras(line: str) -> list[str]:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    asked = [extra for found in re.findall(r"(?:\.|offbeat)\[([\w,]+)\]", line) for extra in found.split(",")]
    return [f"there is no extra {extra}" for extra in asked if extra not in known]


def _script(name: str, words: list[str]) -> list[str]:
    file = ROOT / name.removeprefix(".venv/bin/")
    if not file.exists():
        return [f"{name} does not exist"]
    source = file.read_text(encoding="utf-8")
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    return [f"{name} has no option {option}" for option in options if option not in source]
