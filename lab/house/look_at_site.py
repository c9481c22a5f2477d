"""Build the docs site and look at sixteen pages in Chromium, at 1280 and 390 pixels, light and dark.

    python -m lab.house.look_at_site               two minutes; needs chromium; writes rows house.5 and
                                                   door.8.pages
    python -m lab.house.look_at_site --keep DIR    also keep the screenshots

A fault is a page wider than its window, text of the article outside the window (unless its table or code block
scrolls), text drawn over other text, text that a box cuts off, or a figure with a white area, which is a grey box on a
dark page.
"""

import subprocess
import sys
from pathlib import Path

from lab.figures import ROOT, Figure, command_parser, record
from tests.fixtures.chromium import Chromium

PAGES = (
    "index",
    "start",
    "how-to/choose-an-objective",
    "how-to/bring-a-reward",
    "how-it-works/overview",
    "reference/api",
    "reference/cli",
    "reference/config",
    "reference/presets",
    "reference/metrics",
    "reference/events",
    "how-to/choose-v-and-i",
    "how-it-works/when-to-publish",
    "how-it-works/running",
    "evidence",
    "measured/run",
)

MEASURE = """(() => {
  const faults = [], boxes = [], root = document.documentElement, body = document.body;
  const article = document.querySelector('article');
  if (root.scrollWidth > root.clientWidth + 1) faults.push(`the page is ${root.scrollWidth} px wide`);
  const scrolls = element => {
    for (let one = element; one && one !== document.body; one = one.parentElement)
      if (['auto', 'scroll'].includes(getComputedStyle(one).overflowX)) return true;
    return false;
  };
  let texts = 0;
  const walker = document.createTreeWalker(article, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, element = node.parentElement;
    if (!node.data.trim() || element.closest('math, svg, .headerlink, nav')) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const r of range.getClientRects()) {
      if (r.width < 1 || r.height < 1) continue;
      texts++;
      if (!scrolls(element)) {
        if (r.left < -1 || r.right > root.clientWidth + 1) faults.push(`outside the window: ${node.data.slice(0, 40)}`);
        boxes.push({node, left: r.left, right: r.right, top: r.top, bottom: r.bottom});
      }
    }
  }
  boxes.sort((a, b) => a.top - b.top);
  boxes.forEach((a, i) => {
    for (let j = i + 1; j < boxes.length && boxes[j].top < a.bottom - 3; j++) {
      const b = boxes[j];
      if (a.node !== b.node && Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1)
        faults.push(`overlaps: ${b.node.data.slice(0, 40)}`);
    }
  });
  for (const one of article.querySelectorAll('*'))
    if (getComputedStyle(one).overflowX === 'hidden' && one.scrollWidth > one.clientWidth + 1 && one.clientWidth > 1)
      faults.push(`${one.tagName} is cut: ${one.scrollWidth} px in ${one.clientWidth}`);
  const [red] = getComputedStyle(body).backgroundColor.match(/[\\d.]+/g).map(Number);
  return {faults, texts, dark: red < 128};
})()"""


def main(keep: Path | None) -> bool:
    """Build, look, and record the number of faults."""
    subprocess.run([sys.executable, "scripts/build_site.py"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    boxes = (file for file in (ROOT / "docs").glob("*.svg") if "fill: #ffffff" in file.read_text(encoding="utf-8"))
    faults = [f"{file.name} has a white area" for file in boxes]
    views = 0
    with Chromium() as browser:
        for page in PAGES:
            for width in (1280, 390):
                for dark in (False, True):
                    views += 1
                    file = ROOT / "build" / "site" / f"{page}.html"
                    browser.open(file, width=width, dark=dark)
                    browser.evaluate("localStorage.clear()")  # the site remembers the first color scheme it sees
                    browser.open(file, width=width, dark=dark)
                    found = browser.evaluate(MEASURE)
                    name = f"{page} {width} {'dark' if dark else 'light'}"
                    faults += [f"{name}: {fault}" for fault in found["faults"]]
                    if found["dark"] != dark:
                        faults.append(f"{name}: drawn in the other color scheme")
                    if found["texts"] < 10:
                        faults.append(f"{name}: only {found['texts']} pieces of text: the page was not drawn")
                    if keep is not None:
                        keep.mkdir(parents=True, exist_ok=True)
                        browser.screenshot(keep / f"{name.replace('/', '-').replace(' ', '-')}.png")
    print("\n".join(dict.fromkeys(faults)))
    what = f"faults on {len(PAGES)} pages of the site at 1280 and 390 pixels, light and dark"
    note = "text outside the window, overlapping or cut, figures with white areas; tables and code blocks may scroll"
    rows = (
        Figure(row, what, "0", len(faults), "faults", not faults, views, note) for row in ("house.5", "door.8.pages")
    )
    return record(*rows)


if __name__ == "__main__":
    parser = command_parser(__doc__)
    parser.add_argument("--keep", type=Path)
    sys.exit(not main(parser.parse_args().keep))
