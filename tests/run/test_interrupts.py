"""Ctrl-C in a terminal, which reaches every process of the run: at any moment it ends with a sentence."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import offbeat
from offbeat.run.journal import read
from tests.fixtures.processes import INTERRUPTIBLE
from tests.fixtures.tiny_model import save_model

pytestmark = pytest.mark.engine
TOML = """
steps = {steps}
prompts_per_step = 4
group_size = 4
sampling.max_tokens = 5
model = {{ path = "{model}", compute = "float32", serve = "float32" }}
engine.kind = "{engine}"
objective.zero_variance_mask = false
task = {{ name = "{task}", scorers = 1 }}
"""


class Terminal:
    """`offbeat train` as a process group of its own, as a shell starts it."""

    def __init__(self, place: Path, engine: str = "hf") -> None:
        self.run, file = place / "run", place / "run.toml"
        save_model(place / "model")
        task = Path(__file__).parent / "digits_task.py"
        file.write_text(TOML.format(steps=100000, model=place / "model", task=task, engine=engine))
        self.process = subprocess.Popen(
            [*INTERRUPTIBLE, "train", str(file), "--out", str(self.run)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def kinds(self) -> list[str]:
        events = self.run / "events.jsonl"
        return [str(event["kind"]) for event in read(events)] if events.exists() else []

    def wait_until(self, seen: Callable[["Terminal"], bool]) -> "Terminal":
        deadline = time.monotonic() + 240
        while not seen(self):
            assert self.process.poll() is None and time.monotonic() < deadline, self.process.communicate()[0]
            time.sleep(0.02)
        return self

    def press_ctrl_c(self) -> "Terminal":
        os.killpg(self.process.pid, signal.SIGINT)
        return self

    def end(self) -> str:
        output = self.process.communicate(timeout=240)[0]
        assert "Traceback" not in output and "Error" not in output, output
        return output


MOMENTS: dict[str, Callable[[Terminal], bool]] = {
    "before anything is loaded": lambda terminal: (terminal.run / "config.json").exists(),
    "before the first event": lambda terminal: (terminal.run / "events.jsonl").exists(),
    "before the first step": lambda terminal: "worker ready" in terminal.kinds(),
    "after the first step": lambda terminal: "step" in terminal.kinds(),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_ends_with_a_sentence_and_resume_continues(moment: str, tmp_path: Path) -> None:
    terminal = Terminal(tmp_path).wait_until(MOMENTS[moment])
    output = terminal.press_ctrl_c().end()
    assert f"continue with `offbeat resume {terminal.run}`" in output
    assert terminal.process.returncode == (130 if "stopped; continue" in output else 0)
    step = offbeat.Run(terminal.run).metrics.index.max() if "step" in terminal.kinds() else 0
    resumed = [*INTERRUPTIBLE, "resume", str(terminal.run), "--steps", str(step + 1)]
    done = subprocess.run(resumed, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and f"step {step + 1}/{step + 1}" in done.stdout, done.stdout + done.stderr


def test_ctrl_c_twice_ends_at_once(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path).wait_until(MOMENTS["after the first step"]).press_ctrl_c().press_ctrl_c()
    assert "continue with `offbeat resume" in terminal.end()


def test_ctrl_c_leaves_the_vllm_engine_to_the_run(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, engine="vllm").wait_until(MOMENTS["after the first step"])
    output = terminal.press_ctrl_c().end()
    assert "ended early: interrupted" in output and terminal.process.returncode == 0, output
