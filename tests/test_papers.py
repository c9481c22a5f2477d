"""The experiments of two papers: their arms as configurations, the table, and runs that continue after a kill."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lab.learning.reproduce_arms import SHAPES, without_weights
from offbeat.cli.main import app
from offbeat.config import Config
from offbeat.errors import ConfigError, RunError
from offbeat.events import EventKind
from offbeat.papers import PAPERS, Reproduction
from offbeat.run.directory import RunDirectory
from offbeat.run.journal import FileJournal, read
from offbeat.storage.files import held_by
from tests import ROOT
from tests.fixtures.tiny_model import save_model, save_tokenizer

run = CliRunner(env={"COLUMNS": "200"}).invoke


def reproduction(paper: str, out: Path = Path("runs"), *arms: str, **changes: object) -> Reproduction:
    return replace(Reproduction.of(paper, out, arms), **changes)  # type: ignore[arg-type]


def configs(paper: str, **changes: object) -> dict[str, Config]:
    chosen = reproduction(paper, **changes)
    return {arm: chosen.config_of(arm, 1) for arm in chosen.arms}


@pytest.mark.parametrize("paper", PAPERS)
def test_check_accepts_every_arm_and_finds_a_device_plan_for_a_gpu_of_48_gb(paper: str, tmp_path: Path) -> None:
    model = without_weights(tmp_path / "model", SHAPES[paper])
    chosen = reproduction(paper, tmp_path / "out", settings=(f"model.path={model}",))
    found = list(chosen.devices("1x48"))
    assert [arm for arm, _, _ in found] == [*PAPERS[paper].arms]
    assert all("1 rank of the trainer, 1 engine" in plan and hours for _, plan, hours in found)
    assert [one.directory.path.name for one in chosen.planned("1x48")] == [f"{arm}-seed1" for arm in chosen.arms]


def test_an_arm_that_does_not_fit_is_told_what_does(tmp_path: Path) -> None:
    model = without_weights(tmp_path / "model", SHAPES["p1"])
    options = ["reproduce", "p1", "--model", str(model), "--out", str(tmp_path / "out"), "--plan", "--gpus", "1x24"]
    result = run(app, options)
    assert result.exit_code == 2 and result.output.count("nearest that fits: use 1x") == len(PAPERS["p1"].arms)


def test_the_arm_that_is_known_to_lose_says_that_this_is_accepted(tmp_path: Path) -> None:
    accepted = [arm for paper in PAPERS for arm, config in configs(paper).items() if config.accept]
    assert accepted == ["reinforce-v20"]
    model = without_weights(tmp_path / "model", SHAPES["p1"])
    chosen = reproduction("p1", tmp_path, *accepted, settings=(f"model.path={model}", "accept=false"))
    with pytest.raises(ConfigError, match="known to lose"):
        list(chosen.planned("1x48"))


def test_the_arms_of_p2_are_the_rows_of_the_example_in_trl() -> None:
    tree = ast.parse((ROOT / "examples" / "p2_in_trl.py").read_text(encoding="utf-8"))
    [rows] = [node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets) == "ROWS"]
    assert isinstance(rows, ast.Dict)
    theirs = {ast.literal_eval(key): [ast.literal_eval(one) for one in row.args[:3]]  # type: ignore[attr-defined,arg-type]
              for key, row in zip(rows.keys, rows.values, strict=True)}  # fmt: skip
    ours = {
        arm: [one.longest, one.updates_per_batch, one.objective.resolve().zero_variance_mask]
        for arm, one in configs("p2").items()
    }
    assert ours == theirs


def test_p2_has_the_settings_of_its_section_on_gsm8k() -> None:
    for arm, one in configs("p2").items():
        assert one.objective.kl_coefficient == 0.1 and one.reference.refresh_every == 267, arm
        assert (one.prompts_per_step, one.group_size, one.optimizer.learning_rate) == (28, 16, 5e-6)
        assert one.evaluation.prompts == 1319 and one.evaluation.temperature == one.sampling.temperature == 0.1
        assert one.steps == (267 if arm.startswith("i10") else 4 * 267)


def test_p1_compares_objectives_at_one_lag_and_lags_with_one_objective() -> None:
    found = {
        arm: (one.objective.preset, one.longest, one.sync.offset, one.largest_lag) for arm, one in configs("p1").items()
    }
    assert found == {
        "nois-v1": ("rec-oneside-nois", 1, 0, 0),
        "nois-v20": ("rec-oneside-nois", 20, 0, 19),
        "nois-offset10": ("rec-oneside-nois", 1, 10, 10),
        "nois-offline": ("rec-oneside-nois", 100, 0, 99),
        "is-v20": ("rec-oneside-is", 20, 0, 19),
        "grpo-v20": ("grpo", 20, 0, 19),
        "reinforce-v20": ("reinforce", 20, 0, 19),
    }
    assert {one.objective.kl_coefficient for one in configs("p1").values()} == {0}


@pytest.mark.parametrize("steps", [None, 1, 2, 7, 100])
@pytest.mark.parametrize("short", [False, True])
def test_the_last_step_is_evaluated_and_fully_offline_data_are_of_version_0(steps: int | None, short: bool) -> None:
    for paper in PAPERS:
        for one in configs(paper, steps=steps, short=short).values():
            assert one.steps % one.evaluation.every == 0 and one.steps == (steps or one.steps)
    offline = configs("p1", steps=steps, short=short)["nois-offline"]
    assert offline.longest == offline.steps


def test_a_short_run_says_what_it_can_tell_apart() -> None:
    assert "400 test prompts tell two runs apart from 6.9 points" in reproduction("p1", short=True).resolution
    full, short = (configs("p2", short=short)["v10"] for short in (False, True))
    assert short.steps * 4 == full.steps and short.evaluation.prompts == 1319


def test_names_that_are_not_known_come_with_the_nearest() -> None:
    for words, says in {
        "p3": "'p3' is not a paper; valid: p1, p2",
        "p2 --arms v10,v1-masc": "'v1-masc' is not an arm of p2; did you mean 'v1-mask'?",
        "p2 --seeds one": "--seeds 'one' is not a list of numbers; write 1,2,3",
    }.items():
        result = run(app, ["reproduce", *words.split()])
        assert result.exit_code == 2 and says in result.output


def record(chosen: Reproduction, arm: str, seed: int, rates: Mapping[int, float], why: str | None = "") -> RunDirectory:
    """Record a run with these pass rates by step, which ended for this reason; None if it was killed."""
    directory = RunDirectory(chosen.out / f"{arm}-seed{seed}")
    with directory.create(chosen.config_of(arm, seed)), FileJournal(directory.events) as journal:
        for step, rate in rates.items():
            if step:
                journal.write(EventKind.STEP, step, metrics={"reward_mean": rate})
            journal.write(
                EventKind.EVALUATED, step, version=step, prompts=4, **{"pass@1": [rate, rate - 0.1, rate + 0.1]}
            )
        if why is not None:
            journal.write(EventKind.ENDED, max(rates), why=why)
    return directory


def test_the_table_has_ours_beside_what_was_published(tmp_path: Path) -> None:
    chosen = reproduction("p2", tmp_path, steps=2, settings=("model.path=x",))
    record(chosen, "v1", 1, {0: 0.3, 1: 0.5, 2: 0.4})
    record(chosen, "v1", 2, {0: 0.3, 1: 0.4, 2: 0.42})
    record(chosen, "v1-mask", 1, {0: 0.3, 1: 0.4, 2: 0.5})
    record(chosen, "v10", 1, {0: 0.3, 1: 0.4}, why=None)
    record(chosen, "i10", 1, {0: 0.3, 2: 0.6})
    record(chosen, "i10", 2, {0: 0.3, 2: 0.62})
    rows = [re.split(r" {2,}", line) for line in chosen.table().split("\n")]
    assert ["v1", "1, 2", "2", "0.300", "0.460", "0.410 ± 0.127", "45 % at most, unstable"] in rows
    assert ["v1-mask", "1", "2", "0.300", "0.500", "0.500 [0.400, 0.600]", "50 %, stable"] in rows
    assert ["v10", "1", "1 of 2", "crashed", "50 %, stable"] in rows
    assert ["v10-mask", "none", "not begun", "–"] in rows
    assert any(row[0].startswith("i10 − v1 = +0.200 [") and row[0].endswith("2 and 2 seeds") for row in rows)


@pytest.mark.parametrize("paper", PAPERS)
def test_the_table_of_nothing_has_every_published_figure(paper: str, tmp_path: Path) -> None:
    result = run(app, ["reproduce", paper, "--table", "--out", str(tmp_path)])
    assert result.exit_code == 0 and PAPERS[paper].remark in result.output
    for name, arm in PAPERS[paper].arms.items():
        assert re.search(rf"^{name} .* {re.escape(arm.published)}$", result.output, re.M), name


def test_runs_that_were_begun_with_other_settings_are_not_continued(tmp_path: Path) -> None:
    place = tmp_path / "out"
    options = made(tmp_path)
    begun = reproduction("p2", place, "v1", steps=4, settings=options)
    record(begun, "v1", 1, {0: 0.0, 4: 0.0})
    other = reproduction("p2", place, "v1", steps=2, settings=options)
    with pytest.raises(RunError, match=r"v1-seed1 was begun with other settings \(steps\); choose"):
        other.run(print)
    assert begun.run(print) == []


def made(place: Path) -> tuple[str, ...]:
    """Make a tiny chat model and data in the form of GSM8K, and return the settings of runs with them."""
    save_model(place / "model")
    save_tokenizer(place / "model", chat=True)
    (place / "data").mkdir()
    for split, first in (("train", 0), ("test", 5)):
        rows = [{"question": f"{a}+{b}=", "answer": f"#### {a + b}"} for a in range(5) for b in range(first, first + 5)]
        (place / "data" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (
        f"model.path={place / 'model'}", f"task.options.source={place / 'data'}", "task.options.instruction=",
        "engine.kind=hf", "engine.max_prompt_tokens=24", "sampling.max_tokens=4", "prompts_per_step=2", "group_size=2",
        "evaluation.prompts=2", "trainer.save_every=1", "trainer.token_budget=64", "task.scorers=1",
    )  # fmt: skip


class Command:
    """`offbeat reproduce p2` with two arms of a tiny model, as a process group of its own."""

    def __init__(self, place: Path, settings: tuple[str, ...]) -> None:
        self.out = place / "out"
        words = ["reproduce", "p2", "--arms", "v1,v10", "--steps", "30", "--out", str(self.out)]
        words += [word for one in settings for word in ("--set", one)]
        code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        code += "from offbeat.cli.main import main; main()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *words], env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def kinds(self, arm: str) -> list[str]:
        events = RunDirectory(self.out / f"{arm}-seed1").events
        return [str(event["kind"]) for event in read(events)] if events.exists() else []

    def wait_until(self, seen: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 500
        while not seen():
            assert self.process.poll() is None and time.monotonic() < deadline, self.process.communicate()[0]
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill the command alone; its run has to end by itself."""
        self.process.kill()
        self.process.communicate()
        deadline = time.monotonic() + 60
        while any(held_by(RunDirectory(one).lock) is not None for one in self.out.glob("*-seed1")):
            assert time.monotonic() < deadline, "the run outlives the command"
            time.sleep(0.1)


@pytest.mark.engine
def test_a_killed_command_keeps_finished_arms_and_resumes_the_one_that_it_was_in(tmp_path: Path) -> None:
    settings = made(tmp_path)
    first = Command(tmp_path, settings)
    first.wait_until(lambda: first.kinds("v1").count(EventKind.STEP) >= 3)
    first.kill()
    assert EventKind.ENDED not in first.kinds("v1")

    second = Command(tmp_path, settings)
    second.wait_until(lambda: second.kinds("v1").count(EventKind.ENDED) == 1)
    second.kill()
    kept = RunDirectory(second.out / "v1-seed1").events.read_bytes()
    assert EventKind.RESUMED in second.kinds("v1") and EventKind.ENDED not in second.kinds("v10")

    third = Command(tmp_path, settings)
    said = third.process.communicate(timeout=500)[0]
    assert third.process.returncode == 0, said
    assert RunDirectory(third.out / "v1-seed1").events.read_bytes() == kept, "a finished arm is not touched"
    for arm in ("v1", "v10"):
        assert re.search(rf"^{arm} +1 +30 +0\.\d+ +0\.\d+ +0\.\d+ \[", said, re.M), said


@pytest.mark.engine
def test_ctrl_c_ends_the_run_after_its_step_and_prints_the_table(tmp_path: Path) -> None:
    one = Command(tmp_path, made(tmp_path))
    one.wait_until(lambda: EventKind.STEP in one.kinds("v1"))
    os.killpg(one.process.pid, signal.SIGINT)
    said = one.process.communicate(timeout=500)[0]
    assert one.process.returncode == 130 and "stopped; the same command continues" in said, said
    assert re.search(r"^v1 +1 +\d+ of 30 +stopped", said, re.M) and "Traceback" not in said, said
    assert one.kinds("v10") == []
