"""Damaged files, a real SIGKILL at every step, and many readers: the short form of lab/torture/weights.py."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lab.torture.weights_mutants import mutants

ROOT = Path(__file__).parents[2]


def torture(what: str) -> str:
    command = [sys.executable, "-m", "lab.torture.weights", what, "--short"]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT).stdout


def test_no_damaged_file_is_accepted() -> None:
    [figure] = mutants(140, seed=7)
    assert figure.holds and figure.measured == 0 and figure.n == 140


@pytest.mark.engine
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_a_publisher_killed_at_any_write_or_rename_leaves_a_log_without_mixtures() -> None:
    said = torture("kill")
    assert "found an unloadable one: 0 kills" in said, said
    kills = re.search(r"kills by call: write (\d+), rename (\d+)", said)
    assert kills and int(kills[1]) >= 5 and int(kills[2]) >= 1, said


@pytest.mark.engine
def test_late_joiners_and_killed_readers_cost_the_publisher_nothing() -> None:
    said = torture("fanout")
    assert "end with the last version: 8 of 8 readers" in said, said
    # Times depend on the load of the machine; the number of calls does not.
    assert "with 32 readers − with 1: 0.0 calls" in said, said
