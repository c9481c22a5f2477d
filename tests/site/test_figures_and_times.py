"""Plots follow the reader's color scheme, and the time of the quickstart is stated in one way."""

from pathlib import Path

from typer.testing import CliRunner

from lab.learning.pictures import DARK, follow_color_scheme
from offbeat.cli.init import facts, recipes
from offbeat.cli.main import app

DOCS = Path(__file__).parent.parent.parent / "docs"
TIME = "about three minutes"


def test_a_plot_is_also_drawn_dark(tmp_path: Path) -> None:
    for file in sorted(DOCS.glob("*.svg")):
        text = file.read_text(encoding="utf-8")
        assert text.count(DARK) == 1, file.name
        copy = tmp_path / file.name
        copy.write_text(text.replace(DARK, ""), encoding="utf-8")
        follow_color_scheme(copy)
        follow_color_scheme(copy)
        assert copy.read_text(encoding="utf-8").count(DARK) == 1, file.name


def test_the_time_of_the_quickstart_is_the_same_everywhere() -> None:
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["quickstart", "--help"]).output
    assert TIME in shown and TIME in recipes()["quickstart"].partition("\n")[0]
    assert TIME in facts(recipes()["quickstart"])["needs"]
    assert f"[{TIME}](measured/user-path.md#user-path.1)" in (DOCS / "start.md").read_text(encoding="utf-8")
