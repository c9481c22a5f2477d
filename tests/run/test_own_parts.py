"""Parts of a user's own: given as Python objects or by reference, recorded with their source, checked before a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import offbeat
from offbeat.config import parse
from offbeat.errors import ConfigError, OwnPartError
from offbeat.from_python import described
from offbeat.imports import load_own
from offbeat.objective.spec import Importance, Objective
from offbeat.preflight.checks import check_own_parts
from offbeat.run.cadence import OwnCadence, PublishReason, StepEvidence
from offbeat.run.directory import RunDirectory, changed_inputs, digest_inputs, keep_sources
from tests.run.own_parts_run import IN_TOML, try_route

FILE = """
from dataclasses import dataclass

def gate(ratios_NT, advantages_N1, width=0.5):
    return (ratios_NT - 1).abs() <= width

def one_argument(ratios_NT):
    return ratios_NT > 0

@dataclass
class Rule:
    steps: int
    def due(self, since, publish_seconds):
        return f"{self.steps} steps" if len(since) >= self.steps else None

rule = Rule(2)
number = 3
"""


def close(ratios_NT: Any, advantages_N1: Any, width: float = 0.5) -> Any:
    return (ratios_NT - 1).abs() <= width


@dataclass(frozen=True)
class After:
    steps: int

    def due(self, since: Sequence[object], publish_seconds: float | None) -> str | None:
        return "enough" if len(since) >= self.steps else None


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "own.py"
    file.write_text(FILE)
    return file


def test_python_objects_become_references_to_their_source(tmp_path: Path) -> None:
    objective = Objective(gate=partial(close, width=0.25), weight=Importance(2.0))
    found = described({"objective": objective, "cadence": After(3), "steps": 4}, tmp_path)
    config = parse(found)
    assert [setting for setting, _ in config.own_parts] == ["objective.gate", "sync.cadence"]
    gate, rule = (load_own(reference) for _, reference in config.own_parts)
    assert isinstance(gate, partial)
    assert gate.keywords == {"width": 0.25}
    assert rule == After(3)
    assert config.objective.resolve().weight == Importance(2.0)


@pytest.mark.parametrize("part", [lambda r, a: r > 0, object()])
def test_what_has_no_source_is_refused_with_what_to_give_instead(part: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be recorded: give a function made with `def`, a class"):
        described({"objective": {"gate": part}}, tmp_path)


def test_without_a_run_directory_objects_are_refused_and_objectives_are_not() -> None:
    assert offbeat.load_config(objective=Objective(weight=Importance())).objective.preset == "own"
    with pytest.raises(ConfigError, match=r"an object of this session, which offbeat.train records; here write"):
        offbeat.load_config(cadence=After(3))


def test_an_objective_replaces_the_table_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[objective]\nclip = [0.1, 0.1]\nkl_coefficient = 0.2\n")
    config = offbeat.load_config(tmp_path / "run.toml", objective=Objective(weight=Importance()))
    assert config.objective.resolve() == Objective(weight=Importance())
    changed = offbeat.load_config(tmp_path / "run.toml", objective={"gate": "two-side"})
    assert changed.objective.clip == (0.1, 0.1)


def test_a_refused_run_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="stepps"):
        offbeat.train({}, out=tmp_path / "run", objective=Objective(gate=close), stepps=3)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"objective": {"gate": "own.py:gat"}}, "objective.gate = 'own.py:gat': own.py has no 'gat'; did you mean"),
        ({"objective": {"gate": "own.py:one_argument"}}, "cannot be called with (ratios_NT, advantages_N1): too many"),
        (
            {"objective": {"advantage": "own.py:number"}},
            "is 3, not a function; it is called with (rewards_BG, scored",
        ),
        ({"sync": {"cadence": "own.py:Rule"}}, "cannot be made without arguments (Rule.__init__() missing 1 required"),
        ({"sync": {"cadence": "own.py:gate"}}, "has no method due; it is called with (since, publish_seconds)"),
        ({"engine": {"kind": "own.py:one_argument"}}, "cannot be called with (config, place)"),
        ({"run": {"sinks": ["none.py:Sink"]}}, "run.sinks = 'none.py:Sink': none.py does not exist; give the path"),
    ],
)
def test_check_finds_parts_that_a_run_could_not_use(
    settings: dict[str, Any], problem: str, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own.parent)
    [found] = check_own_parts(parse(settings))
    assert problem in found


def test_a_file_that_raises_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("x = 1\ny = 1 / 0\n")
    [found] = check_own_parts(parse({"engine": {"kind": f"{tmp_path}/broken.py:x"}}))
    assert "broken.py cannot be loaded: ZeroDivisionError: division by zero (line 2); fix the file" in found


def test_a_rule_decides_between_the_first_and_the_last_step_that_it_may(own: Path) -> None:
    rule = OwnCadence.load(f"{own}:rule", at_least=3, at_most=5)
    since = [StepEvidence()] * 5
    assert [rule.due(since[:steps], None) for steps in (2, 3, 5)] == [None, "2 steps", PublishReason.LONGEST]


def test_a_rule_that_returns_no_text_ends_with_a_sentence() -> None:
    class Wrong:
        def due(self, since: Sequence[StepEvidence], publish_seconds: float | None) -> Any:
            return True

    with pytest.raises(OwnPartError, match=r"sync.cadence returned True; it must return a text"):
        OwnCadence(Wrong()).due([StepEvidence()], None)


def test_the_plan_names_the_rule_and_rules_exclude_each_other() -> None:
    config = parse({"sync": {"cadence": "own.py:rule", "every": 8}})
    assert "sync when own.py:rule says so, at the latest after 8 steps" in config.plan
    with pytest.raises(ConfigError, match="are 2 rules for the same decision; keep one of them"):
        parse({"sync": {"cadence": "own.py:rule", "by_cost": True}})


def test_a_changed_source_is_noticed_and_comments_are_not(own: Path, tmp_path: Path) -> None:
    config = parse({"objective": {"gate": f"{own}:gate"}})
    before = digest_inputs(config)
    own.write_text(FILE + "\n# a comment\n")
    assert changed_inputs(before, digest_inputs(config)) == []
    own.write_text(FILE.replace("0.5", "0.4"))
    assert changed_inputs(before, digest_inputs(config)) == [f"the source of {own}:gate"]
    assert changed_inputs({"data": before["data"]}, digest_inputs(config)) == []  # a checkpoint of an earlier release


def test_the_run_directory_keeps_each_source_that_it_was_trained_with(own: Path, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    config = parse({"objective": {"gate": f"{own}:gate"}})
    for text in (FILE, FILE, FILE.replace("0.5", "0.4")):
        own.write_text(text)
        keep_sources(directory, config)
    kept = directory.part_sources()
    assert [(one["setting"], one["part"]) for one in kept] == [("objective.gate", f"{own}:gate")] * 2
    assert [str(one["source"]).count("0.4") for one in kept] == [0, 1]
    assert len({str(one["digest"]) for one in kept}) == 2


@pytest.mark.engine
@pytest.mark.parametrize("route", ["python", "toml", "ray"])
def test_all_parts_survive_a_kill(route: str, tmp_path: Path) -> None:
    extra = 'run.place = "ray"' if route == "ray" else ""
    assert try_route(tmp_path / route, route == "python", extra) == {}
    assert IN_TOML.keys() == {"gate", "advantage", "objective", "Rule", "Sink", "Engine"}
