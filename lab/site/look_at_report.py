"""Check reports of real runs in a real browser, and views in real terminals.

    python -m lab.site.look_at_report            minutes; needs chromium and tmux; writes rows user-path.2.*
    python -m lab.site.look_at_report --short    one run, one report, no terminals; records nothing

The command trains the tiny model with three configurations, opens their reports in Chromium at 1280 and 390 pixels,
light and dark, and measures every piece of text. Then it repeats one report with a tokenizer whose words are hostile,
so that the answers of the model are hostile, too. `--keep DIR` keeps screenshots and terminal screens.
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path

from lab.figures import Figure, command_parser, record
from offbeat.config import Config, parse
from offbeat.reports.page import write_report
from offbeat.run.directory import RunDirectory
from offbeat.run.local import train
from tests.fixtures.chromium import Chromium
from tests.fixtures.hostile_text import TEXTS, encodable
from tests.fixtures.page_faults import look
from tests.fixtures.processes import OFFBEAT
from tests.fixtures.runs import DIGITS_TASK, scratch
from tests.fixtures.terminals import Terminal
from tests.fixtures.tiny_model import save_model

SIZES = ((80, 24), (200, 60))
LIVE_ROWS = ("step", "reward", "pass@1", "lag", "drift", "sync", "time")


def configuration(model: Path, *, steps: int, seed: int = 0, every: int = 6) -> Config:
    """Return a run on a task that a random model learns: write at least two digits."""
    return parse(
        {
            "steps": steps,
            "seed": seed,
            "prompts_per_step": 8,
            "group_size": 8,
            "model": {"path": str(model), "compute": "float32", "serve": "float32"},
            "engine": {"kind": "hf"},
            "sampling": {"max_tokens": 6},
            "sync": {"every": every},
            "optimizer": {"learning_rate": 1e-3},
            "objective": {"zero_variance_mask": False},
            "trainer": {"save_every": 20},
            "evaluation": {"every": 6},
            "task": {"name": str(DIGITS_TASK), "scorers": 1},
        }
    )


def run(config: Config, place: Path) -> RunDirectory:
    directory = RunDirectory(place)
    directory.create(config)
    train(config, directory)
    return directory


def turn_hostile(source: RunDirectory, place: Path) -> RunDirectory:
    """Copy a run and put hostile text into its journal and into the most common words of its tokenizer."""
    shutil.copytree(source.path, place)
    directory = RunDirectory(place)
    file = directory.tokenizer / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    words = content["model"]["vocab"]
    for letter, text in zip("0123456789", TEXTS, strict=True):
        words[encodable(text)] = words.pop(letter)
    file.write_text(json.dumps(content), encoding="utf-8")
    with directory.events.open("a", encoding="utf-8") as events:
        for text in TEXTS:
            alarm = {"at": time.time(), "step": 1, "kind": "alarm", "action": "warn", "says": text, "groups": [text]}
            events.write(json.dumps(alarm) + "\n")
    return directory


def look_at_pages(pages: dict[str, Path], keep: Path | None) -> tuple[list[str], list[str], int]:
    """Open all pages in four ways. Return their faults, the hostile texts that are not shown, and the view count."""
    faults, hidden, views = [], [], 0
    with Chromium() as browser:
        for name, file in pages.items():
            for width in (1280, 390):
                for dark in (False, True):
                    views += 1
                    found, shown = look(browser, file, width=width, dark=dark, keep=keep)
                    faults += [f"{name} {width} {'dark' if dark else 'light'}: {one}" for one in found]
                    if name == "hostile":
                        hidden += [mark for mark in SHOWN_AS if mark not in shown]
    return faults, hidden, views


SHOWN_AS = (
    "<script>document.title='owned'</script>",
    "onerror=alert(1)",
    "\\x1b",
    "\\u202e",
    "more characters",
    "{{ 7 * 7 }}",
)
"""Parts of the hostile text that a reader must see."""


def look_at_view(directory: RunDirectory, width: int, height: int, keep: Path | None) -> list[str]:
    """Return the faults of `offbeat view`: it must fill the screen and react to keys."""
    faults = []
    name = f"view of {directory.path.name} {width}x{height}"
    with Terminal([OFFBEAT, "view", str(directory.path), "--fate", "trained"], width, height) as terminal:
        first = terminal.until(lambda lines: lines[-1].startswith("group 1 of"))
        terminal.press("n", "n", "j")
        third = terminal.until(lambda lines: lines[-1].startswith("group 3 of"))
        for number, lines in ((1, first), (3, third)):
            if len(lines) != height or not lines[-1].startswith(f"group {number} of"):
                faults.append(f"{name}: the last line of group {number} is {lines[-1]!r}")
            if sum("advantage" in line for line in lines) == 0:
                faults.append(f"{name}: no completion of group {number}")
        if "owned" in terminal.title:
            faults.append(f"{name}: the terminal's title is {terminal.title!r}")
        terminal.press("q")
        after = terminal.until(lambda lines: not any("advantage" in line for line in lines))
        if any("advantage" in line for line in after):
            faults.append(f"{name}: q does not close the view")
    _keep(keep, name, [*first, "=" * width, *third])
    return faults


def look_at_live(model: Path, place: Path, width: int, height: int, keep: Path | None) -> list[str]:
    """Return the faults of the live view of `offbeat train`: every row must appear exactly once."""
    name = f"live view {width}x{height}"
    directory = RunDirectory(place)
    directory.create(configuration(model, steps=500))
    with Terminal([OFFBEAT, "resume", str(place)], width, height) as terminal:
        lines = terminal.until(lambda lines: any(line.replace(" ", "").startswith("step1") for line in lines))
        time.sleep(2)
        lines = terminal.screen()
        terminal.press("C-c")
        terminal.until(lambda lines: any("continue with" in line for line in lines))
    _keep(keep, name, lines)
    counts = {row: sum(line.startswith(row + " ") for line in lines) for row in LIVE_ROWS}
    faults = [f"{name}: {count} rows of {row!r}" for row, count in counts.items() if count != 1]
    return faults + ([f"{name}: {len(lines)} lines"] if len(lines) != height else [])


def _keep(keep: Path | None, name: str, lines: list[str]) -> None:
    if keep is not None:
        (keep / f"{name.replace(' ', '-')}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = command_parser(__doc__, short="one run, one report, no terminals; record nothing")
    parser.add_argument("--keep", type=Path, help="directory for screenshots and terminal screens")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    with scratch() as place:
        save_model(place / "model")
        steps = 12 if options.short else 60
        first = run(configuration(place / "model", steps=steps), place / "every6-seed0")
        began = time.monotonic()
        write_report([first.path], place / "one.html")
        seconds = time.monotonic() - began
        pages = {"one": place / "one.html"}
        if options.short:
            faults, _, views = look_at_pages(pages, options.keep)
            print("\n".join(faults) or f"{views} views of a report without a fault")
            sys.exit(bool(faults))
        second = run(configuration(place / "model", steps=steps, seed=1), place / "every6-seed1")
        other = run(configuration(place / "model", steps=steps, every=2), place / "every2")
        hostile = turn_hostile(first, place / "hostile")
        pages |= {"compared": place / "compared.html", "hostile": place / "hostile.html"}
        write_report([first.path, second.path, other.path], pages["compared"])
        write_report([hostile.path], pages["hostile"])
        faults, hidden, views = look_at_pages(pages, options.keep)
        screens = [
            fault for size in SIZES for one in (first, hostile) for fault in look_at_view(one, *size, options.keep)
        ]
        for width, height in SIZES:
            screens += look_at_live(place / "model", place / f"live{width}", width, height, options.keep)
        size = (place / "one.html").stat().st_size / 1e3
    print("\n".join([*faults, *hidden, *screens]))
    good = record(*_figures(faults, hidden, views, screens, size, seconds))
    sys.exit(not good)


def _figures(
    faults: list[str], hidden: list[str], views: int, screens: list[str], size: float, seconds: float
) -> list[Figure]:
    def row(name: str, what: str, found: list[str], n: int) -> Figure:
        note = "; ".join(found)[:300]
        return Figure(f"user-path.2.{name}", what, "0", len(found), "faults", not found, n, note)

    return [
        row(
            "pages",
            "reports of real runs in Chromium (one, three compared, hostile text; 1280 and 390 px; light and dark): "
            "overlaps, cut text, contrast below 4.5, console messages, scripts, requests",
            faults,
            views,
        ),
        row("hostile", "hostile texts that the report does not show literally", hidden, 4 * len(SHOWN_AS)),
        row("terminals", "`view` (also of hostile text) and the live view in tmux at 80x24 and 200x60", screens, 6),
        Figure(
            "user-path.2.size", "a report of 60 steps with plots and sample groups", "<= 1000", round(size, 1), "kB",
            size <= 1000, 1, f"written in {seconds:.1f} s",
        ),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
