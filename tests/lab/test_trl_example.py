"""The TRL example trains with any preset, and with TRL's objective it computes TRL's gradient."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.engine
def test_the_trl_example_learns_with_two_presets_and_has_trls_gradient_with_grpo() -> None:
    # A process of its own, because TRL warns at import and warnings are errors here.
    command = [sys.executable, "-W", "ignore", "-m", "lab.parity.trl_example", "--short"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(re.findall(r"^user-path\.6\.([\w-]+)", done.stdout, re.M)) == {
        "rec-oneside-nois",
        "red-weight",
        "grpo",
        "lines",
    }
