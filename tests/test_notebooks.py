"""The notebooks in examples/ run from top to bottom and show what they promise."""

import re
from pathlib import Path

import pytest

nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
pytestmark = pytest.mark.engine
EXAMPLES = Path(__file__).parent.parent / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.ipynb"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One place for all notebooks, so that the tiny model is made once."""
    return tmp_path_factory.mktemp("notebooks")


def test_what_the_notebooks_show_is_whole_and_of_no_machine() -> None:
    """`python -m lab.site.notebooks` runs them and keeps their outputs."""
    assert len(NAMES) == 3
    for name in NAMES:
        cells = [one for one in nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4).cells if "outputs" in one]
        outputs = [output for cell in cells for output in cell.outputs]
        assert not [one for one in outputs if one.output_type == "error" or one.get("name") == "stderr"], name
        assert "/tmp" not in str(outputs), name
        assert not outputs or (all(cell.execution_count for cell in cells) and "<img" in str(outputs)), name


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_from_top_to_bottom(name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A kernel is often started from another environment, whose search path does not lead to ours.
    monkeypatch.setenv("PATH", "/usr/local/bin:/usr/bin:/bin")
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(place)}}
    ).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    images = [one for one in shown if "<img" in str(one.get("data", {}).get("text/html", ""))]
    assert images, "no curve is shown"
    if name == "first_run":
        assert any("60 of 60" in str(one.get("data", {}).get("text/html", "")) for one in shown), "the live view"
        assert (place / "runs" / "notebook-first" / "exported" / "config.json").is_file()
    if name == "answers_of_others":
        texts = "".join(str(one.get("text", one.get("data", {}).get("text/plain", ""))) for one in shown)
        assert "('finished', 20)" in texts, texts
        for count in (r"quarantined +0\b", r"new +40 scores", r"refused +0\b"):
            assert re.search(count, texts), texts
