"""`offbeat report` and `offbeat view` on the command line."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.cli.main import app
from tests.fixtures.terminals import Terminal
from tests.reports.hostile import make_hostile_run
from tests.reports.made_run import make_run

run = CliRunner(env={"COLUMNS": "200"}).invoke


def test_a_report_is_written_into_the_run_directory(tmp_path: Path) -> None:
    make_run(tmp_path / "one")
    result = run(app, ["report", str(tmp_path / "one")])
    assert result.exit_code == 0, result.output
    assert "pass@1 rose from 0.25 to 1.00" in result.output and str(tmp_path / "one" / "report.html") in result.output
    assert (tmp_path / "one" / "report.html").read_text().startswith("<!doctype html>")


def test_several_runs_make_one_file(tmp_path: Path) -> None:
    places = [str(make_run(tmp_path / name, every=every).path) for name, every in (("a", 2), ("b", 4))]
    result = run(app, ["report", *places, "--out", str(tmp_path / "both.html")])
    assert result.exit_code == 0 and "2 runs of 2 configurations" in result.output
    assert (tmp_path / "both.html").exists()


@pytest.mark.parametrize("by_option", [True, False])
def test_runs_are_named_on_the_command_line(tmp_path: Path, by_option: bool) -> None:
    places = [str(make_run(tmp_path / name, every=every).path) for name, every in (("a", 2), ("b", 4))]
    named = [*places, "--name", "baseline", "--name", "mine"]
    given = named if by_option else [f"baseline={places[0]}", f"mine={places[1]}"]
    result = run(app, ["report", *given, "--out", str(tmp_path / "both.html")])
    assert result.exit_code == 0 and "last pass@1: baseline 1.000, mine 1.000." in result.output
    assert "mine − baseline = +0.000" in result.output and "mine − baseline" in (tmp_path / "both.html").read_text()


def test_a_live_report_writes_no_file(tmp_path: Path) -> None:
    make_run(tmp_path / "one")
    result = run(app, ["report", str(tmp_path / "one"), "--live", "--out", "x.html"])
    assert result.exit_code == 2 and "--live serves the report and writes no file" in result.output


@pytest.mark.parametrize("command", ["report", "view"])
def test_a_directory_without_a_run_is_an_error(tmp_path: Path, command: str) -> None:
    result = run(app, [command, str(tmp_path)])
    assert result.exit_code == 2 and "there is no config.json" in result.output


@pytest.mark.parametrize("command", ["report", "view"])
def test_help_has_an_example(command: str) -> None:
    result = run(app, [command, "--help"])
    assert result.exit_code == 0 and f"offbeat {command} runs/one" in result.output


def test_a_pipe_gets_every_matching_group_as_plain_lines(tmp_path: Path) -> None:
    make_run(tmp_path / "one")
    result = run(app, ["view", str(tmp_path / "one"), "--fate", "trained", "--lag", "1:"])
    assert result.exit_code == 0 and result.output.count("lag 1  trained at step") == 6
    assert "  1  advantage +0.75  2 tokens, stop  v0\n    42\n" in result.output


def test_without_a_matching_group_the_ledger_is_shown(tmp_path: Path) -> None:
    make_run(tmp_path / "one")
    result = run(app, ["view", str(tmp_path / "one"), "--lag", "99:"])
    assert result.exit_code == 1 and "no group matches: 16 generated = 12 trained" in result.output


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (["--fate", "traned"], "did you mean 'trained'?"),
        (["--reward", "high"], "is not a range"),
        (["--lag", "4:2"], "is empty"),
        (["--version", "new"], "is not a range"),
    ],
)
def test_a_wrong_filter_is_an_error_with_a_hint(tmp_path: Path, option: list[str], says: str) -> None:
    make_run(tmp_path / "one")
    result = run(app, ["view", str(tmp_path / "one"), *option])
    assert result.exit_code == 2 and says in result.output


def test_plain_output_of_a_hostile_run_has_no_terminal_escape(tmp_path: Path) -> None:
    make_hostile_run(tmp_path / "one")
    result = run(app, ["view", str(tmp_path / "one"), "--plain"])
    assert result.exit_code == 0 and all(c.isprintable() or c == "\n" for c in result.output)
    assert "\\x1b[2J" in result.output and "980,000 more characters" in result.output


def test_the_groups_that_an_alarm_names_are_shown(tmp_path: Path) -> None:
    make_run(tmp_path / "one")
    result = run(app, ["view", str(tmp_path / "one"), "--group", "g-5", "--group", "g-2"])
    assert result.exit_code == 0 and re.findall(r"^(g-\d+)", result.output, re.M) == ["g-2", "g-5"]


@pytest.mark.engine
def test_filters_and_help_in_a_real_terminal(tmp_path: Path) -> None:
    make_run(tmp_path / "one")
    view = [sys.executable, "-c", "from offbeat.cli.main import main; main()", "view", str(tmp_path / "one")]
    with Terminal(view, 80, 24) as terminal:

        def see(*texts: str) -> str:
            def seen(lines: list[str]) -> bool:
                return all(text in "\n".join(lines) for text in texts)

            shown = "\n".join(terminal.until(seen, 60.0))
            assert all(text in shown for text in texts), shown
            return shown

        assert "? help" in see("group 1 of 16")
        terminal.press("?")
        see("Filters: press the key", "part of a prompt", "quit")
        terminal.press("x")
        see("group 1 of 16")
        terminal.press("f")
        see("fate (")
        terminal.press(*"zero-variance", "Enter")
        see("group 1 of 4", "[fate zero-variance]")
        terminal.press("/", *"nowhere", "Enter")
        see("no group matches")
        terminal.press("n")
        see("group 2 of 4")
        terminal.press("c")
        see("group 1 of 16")
        terminal.press("r", *"high", "Enter")
        see("is not a range")


@pytest.mark.engine
@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60)])
def test_keys_browse_and_the_terminal_is_restored(tmp_path: Path, width: int, height: int) -> None:
    place = make_hostile_run(tmp_path / "one").path
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    before = termios.tcgetattr(inner)
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")} | {"TERM": "xterm-256color"}
    command = [sys.executable, "-c", "from offbeat.cli.main import main; main()", "view", str(place)]
    with subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, env=environment) as process:
        assert "group 1 of 17" in _until(outer, "group 1 of 17")
        os.write(outer, b"nnn")
        assert "g-5" in _until(outer, "group 4 of 17")
        os.write(outer, b"n" * 13)
        last = _until(outer, "group 17 of 17")
        assert "\x1b[2J\x1b]0;owned" not in last and "\\x1b[2J" in last
        os.write(outer, b"q")
        _until(outer, "\x1b[?1049l")  # back from the alternate screen
        assert process.wait(20) == 0
    assert termios.tcgetattr(inner) == before
    os.close(outer)
    os.close(inner)


def _until(terminal: int, text: str) -> str:
    """Read the terminal until the text appears."""
    found, until = "", time.monotonic() + 60
    while text not in found:
        assert time.monotonic() < until, f"{text!r} did not appear: {found[-500:]!r}"
        if select.select([terminal], [], [], 0.2)[0]:
            found += os.read(terminal, 65536).decode(errors="replace")
    return found
