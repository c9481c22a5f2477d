"""Look at the report and the live report in a real browser, with the pointer and with the keyboard.

    python -m lab.site.look_at_first_day            5 minutes; needs chromium; writes rows first-day.5.*
    python -m lab.site.look_at_first_day --short    short runs, one width; records nothing

The command trains the tiny model with two configurations, opens the report of one run and of three compared, as files
and as live reports, at 1280 and 390 pixels, light and dark. It measures every piece of text, reads values off every
chart, and watches a live report while its run goes on. `--keep DIR` keeps screenshots.
"""

import shutil
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import cast

from lab.figures import ROOT, Figure, command_parser, machine, report
from offbeat.config import Config, parse
from offbeat.events import EventKind
from offbeat.reports.page import write_report
from offbeat.reports.serve import ReportServer, ReportSource
from offbeat.run.directory import RunDirectory
from offbeat.run.journal import FileJournal, read
from offbeat.run.local import train
from offbeat.types import Json
from tests.fixtures.chart_values import by_keyboard, by_pointer
from tests.fixtures.chromium import Chromium
from tests.fixtures.page_faults import look, unwanted
from tests.fixtures.runs import Run, scratch
from tests.fixtures.tiny_model import save_model

TASK = ROOT / "lab" / "fixtures" / "few_prompts_task.py"
NAMES = ("baseline", "baseline", "mine")
LONG = 1000
"""Steps of the run whose report must be small."""


def configuration(model: Path, *, steps: int, seed: int = 0, every: int = 4) -> Config:
    return parse(
        {
            "steps": steps,
            "seed": seed,
            "prompts_per_step": 8,
            "group_size": 4,
            "model": {"path": str(model), "compute": "float32", "serve": "float32"},
            "engine": {"kind": "hf"},
            "sampling": {"max_tokens": 6},
            "sync": {"every": every},
            "optimizer": {"learning_rate": 1e-3},
            "objective": {"zero_variance_mask": False},
            "evaluation": {"every": max(4, steps // 20), "prompts": 32},
            "task": {"name": str(TASK), "scorers": 1},
        }
    )


def trained(config: Config, place: Path) -> Path:
    directory = RunDirectory(place)
    directory.create(config)
    train(config, directory)
    return place


def lengthen(run: Path, place: Path) -> Path:
    """Copy a run and repeat its steps until there are `LONG` of them, with noise, so that no two points are alike."""
    shutil.copytree(run, place)
    events = list(read(run / "events.jsonl"))
    steps, random = [event for event in events if event["kind"] == "step"], Random(0)
    with FileJournal(place / "events.jsonl") as journal:
        for step in range(len(steps) + 1, LONG + 1):
            event = steps[step % len(steps)]
            metrics = cast(dict[str, float | None], event["metrics"])
            noisy: dict[str, Json] = {name: v * random.uniform(0.9, 1.1) for name, v in metrics.items() if v}
            rest = {name: value for name, value in event.items() if name not in ("at", "step", "kind", "metrics")}
            journal.write(EventKind.STEP, step, metrics=noisy, **rest)
        journal.write(EventKind.ENDED, LONG, why="")
    return place


@contextmanager
def serving(paths: Sequence[Path], names: Sequence[str] = ()) -> Iterator[str]:
    """Serve a live report and provide its address."""
    with ReportServer(ReportSource(paths, names)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            thread.join()


class Looked:
    """What was found while looking at pages."""

    def __init__(self, browser: Chromium, keep: Path | None) -> None:
        self.browser, self.keep = browser, keep
        self.faults: list[str] = []
        self.misread: list[str] = []
        self.views = self.read = 0

    def at(self, page: Path | str, name: str, widths: Sequence[int]) -> None:
        """Look at a page at every width, light and dark, and read its charts."""
        for width in widths:
            for dark in (False, True):
                view = f"{name} {width} {'dark' if dark else 'light'}"
                found, shown = look(self.browser, page, width=width, dark=dark, keep=self.keep, name=name)
                found += [] if "with rec-oneside-nois" in shown else ["the title does not name the objective"]
                for way in (by_pointer, by_keyboard):
                    charts, wrong = way(self.browser)
                    self.read += charts
                    self.misread += [f"{view}: {one}" for one in wrong]
                if self.keep is not None:
                    self.browser.screenshot(self.keep / f"{view.replace(' ', '-')}-values.png", height=1000)
                self.faults += [f"{view}: {one}" for one in [*found, *unwanted(self.browser, page)]]
                self.views += 1


def watch_live(browser: Chromium, model: Path, place: Path) -> list[str]:
    """Return what is wrong with a live report while its run goes on: it must follow, without loading the page again."""
    RunDirectory(place).create(configuration(model, steps=500))
    run, faults = Run(place), []
    run.start("resume", str(place))
    try:
        run.wait_for("step 2", lambda events: any(e["kind"] == "step" and e["step"] == 2 for e in events), 120)
        with serving([place]) as url:
            browser.open(url, width=1280, dark=False)
            browser.evaluate("window.sameDocument = true; document.querySelector('details').open = true")
            first = _step(browser)
            until = time.monotonic() + 60
            while _step(browser) < first + 3 and time.monotonic() < until:
                time.sleep(0.5)
            faults += [f"the page stayed at step {first}"] if _step(browser) < first + 3 else []
            faults += [] if browser.evaluate("window.sameDocument === true") else ["the page was loaded again"]
            faults += [] if browser.evaluate("document.querySelector('details').open") else ["details were closed"]
            faults += unwanted(browser, url)
            run.finish()
            until = time.monotonic() + 30
            while "Stopped at step" not in str(browser.evaluate("document.body.innerText")):
                if time.monotonic() > until:
                    faults.append("the page does not say that the run has stopped")
                    break
                time.sleep(0.5)
            browser.leave()
    finally:
        if run.driver is not None and run.driver.poll() is None:
            run.driver.kill()
    return faults


def _step(browser: Chromium) -> int:
    return int(browser.evaluate("Number(document.querySelector('.tiles b').textContent)"))


def seconds_to_open(browser: Chromium, page: Path, times: int) -> list[float]:
    """Return the seconds from the start of the navigation to the end of the load event."""
    found = []
    for _ in range(times):
        browser.open(page, width=1280, dark=False)
        entry = "performance.getEntriesByType('navigation')[0]"
        found.append(float(browser.evaluate(f"new Promise(d => setTimeout(() => d({entry}.loadEventEnd / 1000)))")))
    return found


def main() -> None:
    parser = command_parser(__doc__, short="short runs, one width; record nothing")
    parser.add_argument("--keep", type=Path, help="directory for screenshots")
    options = parser.parse_args()
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    steps, widths = (12, (390,)) if options.short else (60, (1280, 390))
    with scratch() as place, Chromium() as browser:
        model = place / "model"
        save_model(model)
        runs = [
            trained(configuration(model, steps=steps, seed=seed, every=every), place / name)
            for name, seed, every in (("a-seed0", 0, 4), ("a-seed1", 1, 4), ("b-seed0", 0, 1))
        ]
        one, three = place / "one.html", place / "three.html"
        write_report(runs[:1], one)
        write_report(runs, three, NAMES)
        looked = Looked(browser, options.keep)
        looked.at(one, "one", widths)
        looked.at(three, "three", widths)
        with serving(runs[:1]) as url:
            looked.at(url, "live one", widths)
            browser.leave()
        with serving(runs, NAMES) as url:
            looked.at(url, "live three", widths)
            browser.leave()
        live = watch_live(browser, model, place / "live")
        write_report([lengthen(runs[0], place / "long")], place / "long.html")
        size, opened = (place / "long.html").stat().st_size / 1e6, seconds_to_open(browser, place / "long.html", 5)
    print("\n".join([*looked.faults, *looked.misread, *live]))
    sys.exit(not report(options.short, *_figures(looked, live, size, opened)))


def _figures(looked: Looked, live: list[str], size: float, opened: list[float]) -> list[Figure]:
    seconds = statistics.median(opened)
    return [
        Figure(
            "first-day.5.pages",
            "report and live report, one run and three compared, 1280 and 390 px, light and dark: overlaps, cut text, "
            "contrast below 4.5, a page wider than its window, console messages, requests to other places",
            "0", len(looked.faults), "faults", not looked.faults, looked.views, "; ".join(looked.faults)[:300],
        ),
        Figure(
            "first-day.5.values",
            "charts whose values the pointer or the arrow keys do not show as the journal has them",
            "0", len(looked.misread), "charts", not looked.misread, looked.read, "; ".join(looked.misread)[:300],
        ),
        Figure(
            "first-day.5.live",
            "a live report of a run that goes on: it follows the run in the same document, keeps what is open, says "
            "that the run has stopped",
            "0", len(live), "faults", not live, 1, "; ".join(live)[:300],
        ),
        Figure(
            "first-day.5.size", f"the report of a run of {LONG:,} steps", "<= 2", round(size, 2), "MB", size <= 2, 1,
            "the steps of a real run, repeated with noise",
        ),
        Figure(
            "first-day.5.opens", f"time until Chromium has loaded it, of {LONG:,} steps, from a file", "<= 2",
            round(seconds, 2), "s", seconds <= 2, len(opened), f"{min(opened):.2f} to {max(opened):.2f}; {machine()}",
        ),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
