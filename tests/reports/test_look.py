"""The lab's page checker finds broken pages, and finds nothing in a report. Needs Chromium."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offbeat.reports.page import write_report
from tests.fixtures.chart_values import by_keyboard, by_pointer
from tests.fixtures.chromium import Chromium
from tests.fixtures.page_faults import look
from tests.reports.hostile import make_hostile_run
from tests.reports.made_run import make_run

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not (shutil.which("chromium") or shutil.which("chromium-browser")), reason="needs chromium"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with Chromium() as one:
        yield one


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("report")
    make_run(place / "one")
    write_report([place / "one"], place / "report.html")
    return place / "report.html"


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("hostile", [False, True])
def test_a_report_has_no_faults(
    browser: Chromium, report: Path, tmp_path: Path, width: int, dark: bool, hostile: bool
) -> None:
    if hostile:
        report = tmp_path / "hostile.html"
        write_report([make_hostile_run(tmp_path / "hostile").path], report)
    faults, shown = look(browser, report, width=width, dark=dark, keep=None)
    assert faults == [] and "the ledger balances" in shown


@pytest.mark.parametrize("read", [by_pointer, by_keyboard])
def test_every_chart_shows_its_values(
    browser: Chromium, report: Path, read: Callable[[Chromium], tuple[int, list[str]]]
) -> None:
    browser.open(report, width=1280, dark=False)
    charts, wrong = read(browser)
    assert charts >= 7 and wrong == []


@pytest.mark.parametrize("read", [by_pointer, by_keyboard])
def test_values_that_are_not_shown_are_detected(
    browser: Chromium, report: Path, tmp_path: Path, read: Callable[[Chromium], tuple[int, list[str]]]
) -> None:
    silent = tmp_path / "silent.html"
    text = report.read_text(encoding="utf-8")
    silent.write_text(text.replace("readout.hidden = false", "readout.hidden = true"), encoding="utf-8")
    browser.open(silent, width=1280, dark=False)  # the changed script has another digest, so it does not run at all
    charts, wrong = read(browser)
    assert len(wrong) >= (charts if read is by_pointer else 1)


@pytest.mark.parametrize(
    ("wrong", "seen"),
    [
        ("<style>h2 { margin-bottom: -30px }</style>", "overlaps"),
        ("<style>main { min-width: 1500px }</style>", "the page is"),
        ("<style>.note { width: 60px; white-space: nowrap; overflow: hidden }</style>", "is cut"),
        ("<style>.note { color: #bbb }</style>", "contrast"),
        ("<style>svg text { transform: translateX(30px) }</style>", "outside its plot"),
        ("<script>1</script>", "2 scripts"),
        ("<img src=http://127.0.0.1:9/x.png>", "Log.entryAdded"),
    ],
)
def test_a_broken_page_is_detected(browser: Chromium, report: Path, tmp_path: Path, wrong: str, seen: str) -> None:
    broken = tmp_path / "offbeat.html"
    broken.write_text(report.read_text(encoding="utf-8").replace("</body>", f"{wrong}</body>"), encoding="utf-8")
    faults, _ = look(browser, broken, width=1280, dark=False, keep=None)
    assert any(seen in fault for fault in faults), faults


def test_a_network_request_is_detected(browser: Chromium, report: Path, tmp_path: Path) -> None:
    asking = tmp_path / "offbeat.html"
    without_policy = report.read_text(encoding="utf-8").replace("Content-Security-Policy", "x")
    asking.write_text(without_policy.replace("</body>", "<img src=http://127.0.0.1:9/x.png></body>"), encoding="utf-8")
    faults, _ = look(browser, asking, width=1280, dark=False, keep=None)
    assert any("asked for http://127.0.0.1:9/x.png" in fault for fault in faults), faults
