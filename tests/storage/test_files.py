"""Processes of one machine take turns, and none waits for ever."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from offbeat.storage.files import taking_turns

HOLD = """
import sys, time
from pathlib import Path
from offbeat.storage.files import taking_turns
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
