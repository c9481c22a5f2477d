"""A plot that a notebook shows and that can be written to a file."""

import base64
import os
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Chart:
    """A plot as SVG. A notebook shows it; `save` writes it to a file."""

    svg: str = field(repr=False)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the SVG file and return its path."""
        Path(path).write_text(self.svg, encoding="utf-8")
        return Path(path)

    def _repr_html_(self) -> str:
        # As an image, because styles inside an SVG would apply to the whole notebook.
        return f'<img alt="" src="data:image/svg+xml;base64,{base64.b64encode(self.svg.encode()).decode()}">'
