"""Check the docs: run code blocks, look up commands, follow links, trace figures to their rows.

    python -m lab.site.checked           rows user-path.5.blocks, .links and .claims; about two minutes
    python -m lab.site.checked --short   without the shell blocks that are run; nothing recorded

`tests/site/test_docs.py` makes the same checks, page by page.
"""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from contextlib import chdir
from pathlib import Path

from lab.figures import ROOT, Figure, command_parser, report
from lab.site.commands import commands, faults
from lab.site.pages import DIARY, Block, blocks, claims, dead_links, links, page_name, pages
from offbeat.config import parse


def look_up(block: Block) -> list[str]:
    """Return what is wrong with a block that is not run: a configuration, or commands."""
    if block.language == "bash":
        return [fault for line in commands(block.text) for fault in faults(line)]
    if block.language == "toml":
        parse(tomllib.loads(block.text))
    return []


def run(page: Path, place: Path, *, shell: bool) -> Counter[str]:
    """Run the blocks of a page in order, in one session, as a reader would type them. Raise if one fails."""
    done: Counter[str] = Counter()
    namespace: dict[str, object] = {"__name__": "docs"}
    with chdir(place):
        for block in blocks(page.read_text(encoding="utf-8")):
            if block.file:
                assert block.text.strip() in (ROOT / block.file).read_text(encoding="utf-8"), f"{block.file} differs"
            elif block.language == "python":
                exec(compile("\n" * block.line + block.text, str(page), "exec"), namespace)
                done["python"] += 1
            elif block.run and shell:
                _run_shell(page, block)
                done["shell"] += 1
    return done


def _run_shell(page: Path, block: Block) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # The whole quickstart has a test of its own; here the commands after it need only its files.
    text = re.sub(r"^offbeat quickstart$", "offbeat quickstart --steps 2", block.text, flags=re.M)
    command = ["bash", "-euo", "pipefail", "-c", text]
    done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{page_name(page)}, line {block.line}:\n{done.stdout}{done.stderr}")


def check_blocks(short: bool) -> Figure:
    """Check every block of every page."""
    done: Counter[str] = Counter()
    wrong = []
    for page in pages():
        found = blocks(page.read_text(encoding="utf-8"))
        done["code"] += sum(block.language in ("python", "bash", "toml") for block in found)
        done["looked up"] += sum(block.language in ("bash", "toml") and not block.run for block in found)
        with tempfile.TemporaryDirectory() as place:
            try:
                wrong += [fault for block in found for fault in look_up(block)]
                done += run(page, Path(place), shell=not short)
            except Exception as error:  # the boundary of a page: any error of a block is reported
                wrong.append(f"{page_name(page)}: {type(error).__name__}: {error}")
        print(f"{page_name(page)}: {len(found)} blocks", flush=True)
    print(*wrong, sep="\n")
    return Figure(
        "user-path.5.blocks",
        "code blocks of README, ARCHITECTURE, CONTRIBUTING and docs/ that run, or whose commands and settings exist",
        "all",
        done["code"] - len(wrong),
        f"of {done['code']}",
        not wrong,
        done["code"],
        f"{done['python']} Python and {done['shell']} shell blocks run; {done['looked up']} others looked up: their "
        "commands parsed with all options, their TOML taken as configurations",
    )


def check_links() -> Figure:
    """Check every link within the repository."""
    targets = [target for page in pages() for target in links(page.read_text(encoding="utf-8"))]
    inside = [target for target in targets if not re.match(r"\w+:", target)]
    dead = [link for page in pages() for link in dead_links(page)]
    print(*dead, sep="\n")
    return Figure(
        "user-path.5.links",
        "links of the docs to files and headings that exist",
        "all",
        len(inside) - len(dead),
        f"of {len(inside)}",
        not dead,
        len(inside),
        f"{len(targets) - len(inside)} links to other sites are not followed: the check needs no network",
    )


def check_claims() -> Figure:
    """Check every figure in prose."""
    found = [claim for page in pages() if page_name(page) != DIARY for claim in claims(page)]
    loose = [claim for claim in found if not claim.grounded]
    print(*(f"{claim.page}: {claim.number} in {claim.passage[:120]!r}" for claim in loose), sep="\n")
    return Figure(
        "user-path.5.claims",
        "figures in prose that link to their row of lab/results, share a page with its table, or cite a publication",
        "all",
        len(found) - len(loose),
        f"of {len(found)}",
        not loose,
        len(found),
        f"numbers with a unit, with decimals or in the thousands, outside built tables and the diary {DIARY}",
    )


def main() -> bool:
    short = command_parser(__doc__, short="skip the shell blocks that run; record nothing").parse_args().short
    return report(short, check_blocks(short), check_links(), check_claims())


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(not main())
