"""Run the notebooks of examples/ from top to bottom and keep what they show, so that a reader sees it without running.

    python -m lab.site.notebooks               all three; 5 minutes
    python -m lab.site.notebooks first_run     one of them

Progress on stderr is left out: it is of use only while a cell runs.
"""

import sys
import tempfile
from pathlib import Path

from lab.figures import ROOT, command_parser

EXAMPLES = ROOT / "examples"


def main(names: list[str]) -> int:
    """Execute the notebooks in a place of their own, and write them with their outputs."""
    import nbclient
    import nbformat

    with tempfile.TemporaryDirectory(prefix="offbeat-lab-") as place:
        for name in names:
            file = EXAMPLES / f"{name}.ipynb"
            notebook = nbformat.reads(file.read_text(encoding="utf-8"), as_version=4)  # type: ignore[no-untyped-call]
            nbclient.NotebookClient(
                notebook, timeout=3600, kernel_name="python3", resources={"metadata": {"path": place}}
            ).execute()
            for cell in notebook.cells:
                cell.metadata = {}
                if cell.cell_type == "code":
                    cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
            notebook.metadata.pop("language_info", None)
            text = nbformat.writes(notebook)  # type: ignore[no-untyped-call]
            if place in text or str(Path.home()) in text:
                raise SystemExit(f"{name}: an output has a path of this machine; print relative paths")
            file.write_text(text + "\n", encoding="utf-8")
            print(f"{file.relative_to(ROOT)}: {len(text) // 1024} KiB", flush=True)
    return 0


if __name__ == "__main__":
    parser = command_parser(__doc__)
    parser.add_argument("names", nargs="*", help="default: all of them")
    given = parser.parse_args().names
    sys.exit(main(given or sorted(path.stem for path in EXAMPLES.glob("*.ipynb"))))
