"""Read values off the charts of a report, as a person does: with the pointer, and with the keyboard."""

import re
from typing import Final

from lab.fixtures.chromium import Chromium

_PREPARE: Final = """(() => {
  document.querySelectorAll('details.run').forEach((one, i) => { one.open = i === 0; });
  document.activeElement.blur();
  return [...document.querySelectorAll('.chart')].filter(one => one.checkVisibility()).length;
})()"""
_MIDDLE: Final = """(() => {
  const chart = [...document.querySelectorAll('.chart')].filter(one => one.checkVisibility())[%d];
  chart.scrollIntoView({block: 'center'});
  const box = chart.querySelector('svg').getBoundingClientRect(), plot = JSON.parse(chart.dataset.plot);
  const one = plot.series.find(s => s.x), i = Math.floor(one.x.length / 2), [low, high, start, end] = plot.x;
  const x = start + (one.x[i] - low) / (high - low) * (end - start);
  return {x: box.left + x / 400 * box.width, y: box.top + box.height / 2, step: one.x[i], value: one.y[i],
          name: chart.getAttribute('aria-label').split(':')[0]};
})()"""
_SHOWN: Final = """[...document.querySelectorAll('.readout')].filter(one => !one.hidden).map(one => {
  const box = one.getBoundingClientRect();
  return {text: one.innerText, inside: box.left >= -1 && box.right <= innerWidth + 1};
})"""
_FOCUSED: Final = """(() => {
  const chart = document.activeElement.closest('.chart');
  if (!chart) return null;
  const one = JSON.parse(chart.dataset.plot).series.find(s => s.x);
  const all = [...new Set(JSON.parse(chart.dataset.plot).series.flatMap(s => s.x ?? []))].sort((a, b) => a - b);
  const at = all[Math.max(0, all.length - 2)], i = one.x.indexOf(at);
  return {name: chart.getAttribute('aria-label').split(':')[0], step: at, value: i < 0 ? null : one.y[i]};
})()"""


def _has(text: str, value: float) -> bool:
    """True if a number of the text is the value, rounded to four digits, or to three if it has an exponent."""
    numbers = [float(one) for one in re.findall(r"-?\d+(?:\.\d+)?(?:e[+-]\d+)?", text)]
    return any(abs(one - value) <= 6e-3 * abs(value) if 0 < abs(value) < 1e-3 else abs(one - value) <= 6e-4 * abs(value)
               for one in numbers)  # fmt: skip


def _wrong(name: str, step: float, value: float | None, shown: list[dict[str, object]]) -> list[str]:
    """Compare what one chart shows with what it should show."""
    if len(shown) != 1:
        return [f"{name}: {len(shown)} charts show values"]
    text = str(shown[0]["text"])
    faults = [] if shown[0]["inside"] else [f"{name}: the values are outside the window"]
    heading, _, values = text.partition("\n")
    if not _has(heading, step):
        faults.append(f"{name}: step {step} is shown as {text!r}")
    if value is not None and not _has(values, value):
        faults.append(f"{name}: {value} at step {step} is shown as {text!r}")
    return faults


def by_pointer(browser: Chromium) -> tuple[int, list[str]]:
    """Point at the middle of every visible chart; return how many there are, and what they show wrongly."""
    charts, faults = int(browser.evaluate(_PREPARE)), []
    for number in range(charts):
        place = browser.evaluate(_MIDDLE % number)
        browser.point(place["x"], place["y"])
        faults += _wrong(place["name"], place["step"], place["value"], browser.evaluate(_SHOWN))
    browser.point(0, 0)
    if left := browser.evaluate(_SHOWN):
        faults.append(f"{len(left)} charts show values although the pointer has left")
    return charts, faults


def by_keyboard(browser: Chromium) -> tuple[int, list[str]]:
    """Go to every visible chart with Tab and to its last point but one with the arrow keys."""
    charts, faults, seen = int(browser.evaluate(_PREPARE)), [], 0
    for _ in range(4 * charts + 20):
        browser.press("Tab", 9)
        if (place := browser.evaluate(_FOCUSED)) is None:
            if seen == charts:
                break
            continue
        browser.press("ArrowLeft", 37)
        faults += _wrong(place["name"], place["step"], place["value"], browser.evaluate(_SHOWN))
        seen += 1
    if seen != charts:
        faults.append(f"Tab reaches {seen} of {charts} charts")
    return charts, faults
