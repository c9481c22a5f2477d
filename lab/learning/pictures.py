"""Make a plot readable on a dark page: an SVG that follows the reader's color scheme."""

from pathlib import Path
from typing import Final

DARK: Final = "@media (prefers-color-scheme: dark) { svg { filter: invert(0.92) hue-rotate(180deg) } }"
"""Light becomes dark and dark becomes light; hues stay. It also works where the page shows the file as an image."""


def follow_color_scheme(file: Path) -> None:
    """Add the rule to an SVG of matplotlib, unless it is there, and let the page show through its white areas.

    A white area would become a grey box on a dark page.
    """
    text = file.read_text(encoding="utf-8").replace('style="fill: #ffffff', 'style="fill: none')
    if DARK not in text:
        text = text.replace("</style>", f"\n{DARK}</style>", 1)
    file.write_text(text, encoding="utf-8")
