"""Processes of one machine take turns, and none waits for ever."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from offbeat.errors import RunError
from offbeat.storage.files import FileLock, LockHeld, held_by, require_plain_tree, taking_turns

HOLD = """
import sys, time
from pathlib import Path
import pytest

from offbeat.errors import RunError
from offbeat.storage.files import FileLock, LockHeld, held_by, require_plain_tree, taking_turns
with taking_turns(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@contextmanager
def held_elsewhere(path: Path, seconds: float) -> Iterator[None]:
    """Let another process have its turn for so long."""
    command = [sys.executable, "-c", HOLD, str(path), str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "held\n"
            yield
        finally:
            process.kill()


def test_a_process_waits_for_the_turn_of_another(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path / "turn", seconds=0.5):
        began = time.monotonic()
        with taking_turns(tmp_path / "turn", patience=60.0):
            assert 0.3 < time.monotonic() - began < 30.0


def test_a_process_that_does_not_end_its_turn_stops_no_others(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path / "turn", seconds=600.0):
        began = time.monotonic()
        with taking_turns(tmp_path / "turn", patience=0.2):
            assert time.monotonic() - began < 30.0


def test_a_turn_ends_with_its_process(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path / "turn", seconds=600.0):
        pass
    began = time.monotonic()
    with taking_turns(tmp_path / "turn", patience=600.0):
        assert time.monotonic() - began < 30.0


def test_where_no_file_can_be_made_nobody_waits(tmp_path: Path) -> None:
    with taking_turns(tmp_path / "missing" / "turn", patience=600.0):
        assert not (tmp_path / "missing").exists()


def test_a_lock_can_be_looked_at_by_another_process(tmp_path: Path) -> None:
    path = tmp_path / "driver.lock"
    assert held_by(path) is None and not path.exists(), "looking creates nothing"
    lock = FileLock(path)
    code = "import sys; from pathlib import Path; from offbeat.storage.files import held_by\n"
    code += "print(held_by(Path(sys.argv[1])))"
    seen = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True).stdout
    assert seen.startswith(f"process {os.getpid()} on ")
    lock.release()
    assert held_by(path) is None
    with pytest.raises(LockHeld):
        kept = FileLock(path)
        FileLock(path)
    kept.release()


def test_a_tree_of_files_may_hold_links_to_itself_only(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "ray").mkdir(parents=True)
    (run / "a").write_text("")
    (run / "b").symlink_to("a")
    os.mkfifo(run / "ray" / "socket")
    require_plain_tree(run, only={"a", "b", "c"})
    with pytest.raises(RunError, match="socket is neither a file nor a directory"):
        require_plain_tree(run)
    (run / "c").symlink_to(tmp_path)
    with pytest.raises(RunError, match="c is a link out of"):
        require_plain_tree(run, only={"a", "b", "c"})
