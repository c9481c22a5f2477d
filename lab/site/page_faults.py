"""Find what is wrong with a page as the browser draws it, by measuring every piece of text."""

from pathlib import Path
from typing import Final

from lab.fixtures.chromium import Chromium

QUIET: Final = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Page.javascriptDialogOpening")
"""Events that a correct page does not send."""

_MEASURE: Final = """(() => {
  const faults = [], root = document.documentElement, boxes = [];
  document.querySelectorAll('details').forEach(one => one.open = true);
  if (root.scrollWidth > root.clientWidth) faults.push(`the page is ${root.scrollWidth} px wide`);
  const say = (what, node) => faults.push(`${what}: ${node.data.trim().slice(0, 40)}`);
  const luminance = color => color.map(c => c / 255).map(c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
  const parsed = text => text.match(/[\\d.]+/g).map(Number);
  const ground = element => {
    for (let one = element; one; one = one.parentElement) {
      const color = parsed(getComputedStyle(one).backgroundColor);
      if (color.length < 4 || color[3] > 0) return color.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, element = node.parentElement;
    if (!node.data.trim()) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const rects = [...range.getClientRects()].filter(r => r.width > .5 && r.height > .5);
    if (!rects.length) continue;
    const frame = element.closest('svg')?.getBoundingClientRect();
    for (const r of rects) {
      boxes.push({node, left: r.left, right: r.right, top: r.top, bottom: r.bottom});
      if (r.left < -1 || r.right > root.clientWidth + 1) say('outside the page', node);
      if (frame && (r.left < frame.left - 1 || r.right > frame.right + 1 || r.bottom > frame.bottom + 1))
        say('outside its plot', node);
    }
    const style = getComputedStyle(element), ink = parsed(frame ? style.fill : style.color).slice(0, 3);
    const [a, b] = [luminance(ink), luminance(ground(element))].sort((x, y) => y - x);
    if ((a + .05) / (b + .05) < 4.5) say(`contrast ${((a + .05) / (b + .05)).toFixed(1)}`, node);
  }
  boxes.sort((a, b) => a.top - b.top);
  boxes.forEach((a, i) => {
    for (let j = i + 1; j < boxes.length && boxes[j].top < a.bottom - 2; j++) {
      const b = boxes[j];
      if (a.node !== b.node && Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1) say('overlaps', b.node);
    }
  });
  for (const one of document.querySelectorAll('body *')) {
    if (getComputedStyle(one).overflowX !== 'visible' && one.scrollWidth > one.clientWidth + 1)
      faults.push(`${one.tagName} ${one.className} is cut: ${one.scrollWidth} px in ${one.clientWidth}`);
  }
  return {faults, texts: boxes.length, scripts: document.scripts.length, title: document.title,
          shown: document.body.innerText};
})()"""


def look(
    browser: Chromium, page: Path | str, *, width: int, dark: bool, keep: Path | None, name: str = ""
) -> tuple[list[str], str]:
    """Return the faults of a page at this width and color scheme, and the text that a person sees.

    A file may ask for nothing; a page of a server only for what is below its own address.
    """
    browser.open(page, width=width, dark=dark)
    found = browser.evaluate(_MEASURE)
    faults: list[str] = found["faults"]
    if found["texts"] < 50:
        faults.append(f"only {found['texts']} pieces of text, expected at least 50: the page was not drawn")
    if found["scripts"] != 1 or "offbeat" not in found["title"] or "owned" in found["title"]:
        faults.append(f"{found['scripts']} scripts, title {found['title']!r}")
    faults += unwanted(browser, page)
    if keep is not None:
        stem = name or (page.stem if isinstance(page, Path) else "page")
        browser.screenshot(keep / f"{stem}-{width}-{'dark' if dark else 'light'}.png")
    return faults, str(found["shown"])


def unwanted(browser: Chromium, page: Path | str) -> list[str]:
    """Return the messages on the console and the requests to other places, since the page was opened."""
    faults = []
    for event in browser.events:
        if event.get("method") in QUIET:
            faults.append(f"{event['method']}: {str(event.get('params'))[:200]}")
        if event.get("method") == "Network.requestWillBeSent":
            asked = event["params"]["request"]["url"]
            own = asked == page.resolve().as_uri() if isinstance(page, Path) else asked.startswith(page)
            if not own:
                faults.append(f"asked for {asked[:200]}")
    return faults
