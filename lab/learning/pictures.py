"""Make a plot readable on a dark page: an SVG that follows the reader's color scheme."""

from pathlib import Path
from typing import Final

DARK: Final = "@media (prefers-color-scheme: dark) { svg { filter: invert(0.92) hue-rotate(180deg) } }"
"""Light becomes dark and dark becomes light; hues stay. It also works where the page shows the file as an image."""


def follow_color_scheme(file: Path) -> None:
    """Add the rule to an SVG of matplotlib, unless it is there."""
    text = file.read_text(encoding="utf-8")
    if DARK not in text:
        file.write_text(text.replace("</style>", f"\n{DARK}</style>", 1), encoding="utf-8")
