"""Processes of one machine take turns, and none waits for ever."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lab.fixtures.processes import Send, fork, kill
from offbeat.storage.files import taking_turns


@contextmanager
def held_elsewhere(path: Path, seconds: float) -> Iterator[None]:
    """Let another process have its turn for so long."""

    def work(send: Send) -> None:
        with taking_turns(path):
            send("held")
            time.sleep(seconds)

    pid, pipe = fork(work)
    try:
        assert os.read(pipe, 5) == b"held\n"
        yield
    finally:
        kill(pid)
        os.waitpid(pid, 0)
        os.close(pipe)


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
