"""The examples of CONTRIBUTING.md run as they stand there, and what they define fits where they say that it goes."""

import inspect
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
import typer
from typer.testing import CliRunner

from offbeat.config.parts import ENGINES, SINKS
from offbeat.imports import resolve
from offbeat.metrics import METRICS
from offbeat.objective.losses import Streams, counts, policy_loss
from offbeat.objective.presets import PRESETS
from offbeat.rollout.engine import Engine
from offbeat.storage.store import Store
from offbeat.types import UNKNOWN
from tests.fixtures.pages import blocks

PAGE = Path(__file__).parent.parent / "CONTRIBUTING.md"


@pytest.fixture(scope="module")
def defined() -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "contributing"}
    for block in blocks(PAGE.read_text(encoding="utf-8")):
        if block.language == "python":
            exec(compile("\n" * block.line + block.text, str(PAGE), "exec"), namespace)
    return namespace


def test_the_objective_can_be_trained_and_has_all_that_a_preset_has(defined: dict[str, Any]) -> None:
    preset = defined["my_objective"]
    assert type(preset) is type(PRESETS["grpo"])
    policy = torch.full((2, 3), -1.0, requires_grad=True)
    mask = torch.ones(2, 3, dtype=torch.bool)
    behavior = torch.full((2, 3), -1.0)
    behavior[0, 0] = -3.0  # outside the band
    streams = Streams(policy, behavior, UNKNOWN, UNKNOWN, torch.tensor([1.0, -1.0]), torch.ones(2), mask)
    policy_loss(preset.objective, streams, counts(mask)).total.backward()
    assert policy.grad is not None
    assert policy.grad[0].tolist() == pytest.approx([0.0, -1 / 6, -1 / 6])


def test_the_task_scores(defined: dict[str, Any]) -> None:
    task = defined["task"]
    assert task.rewards[0](" Paris.", task.examples[0].columns) == 1.0
    assert task.rewards[0](" Rome.", task.examples[0].columns) == 0.0


@pytest.mark.parametrize(("name", "protocol"), [("MyEngine", Engine), ("MyStore", Store)])
def test_engine_and_store_have_what_their_protocols_ask_for(
    name: str, protocol: type[Protocol], defined: dict[str, Any]
) -> None:
    asked = {one for one in dir(protocol) if not one.startswith("_")} | set(inspect.get_annotations(protocol))
    for member in asked:
        own, theirs = inspect.getattr_static(defined[name], member), inspect.getattr_static(protocol, member, None)
        if inspect.isfunction(theirs):
            assert list(inspect.signature(own).parameters) == list(inspect.signature(theirs).parameters), member
            assert inspect.iscoroutinefunction(own) == inspect.iscoroutinefunction(theirs), member


def test_the_metric_is_a_declaration(defined: dict[str, Any]) -> None:
    assert type(defined["clipped_share"]) is type(METRICS["ess"])


def test_the_command_runs_and_its_docstring_is_its_help(defined: dict[str, Any]) -> None:
    app = typer.Typer()
    app.command()(defined["prune"])
    assert "runs/one/experience" in CliRunner().invoke(app, ["--help"]).output
    assert CliRunner().invoke(app, ["log"]).exit_code == 0


def test_every_engine_and_sink_that_has_a_name_can_be_loaded() -> None:
    for reference in [*(kind.open for kind in SINKS.values()), *(kind.start for kind in ENGINES.values())]:
        assert callable(resolve(reference))
