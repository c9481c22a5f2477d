"""Every choice on every axis of an objective can be written in TOML, and is the same value as in Python."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat.config import Config, examine, parse
from offbeat.config.axes import KINDS, objective_table
from offbeat.config.parsing import load
from offbeat.errors import ConfigError
from offbeat.objective.credit import advantages
from offbeat.objective.losses import importance_weights, passes
from offbeat.objective.presets import PRESETS
from offbeat.objective.spec import (
    KL,
    Advantage,
    CentredBand,
    GroupESS,
    Importance,
    Level,
    NoGate,
    Objective,
    OwnFunction,
    SquaredLogRatio,
    TwoSide,
)

OWN = """
from offbeat.objective.spec import Objective, OneSide

def narrow(ratios_NT, advantages_N1):
    return (ratios_NT - 1).abs() < 0.1

def signs(rewards_BG, scored_BG):
    return rewards_BG.sign()

mine = Objective(advantage=signs, gate=narrow, baseline_shift=0.5)
plain = Objective(gate=OneSide(high=0.3))
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return file


def toml(tmp_path: Path, text: str) -> Config:
    file = tmp_path / "run.toml"
    file.write_text(text)
    return load(file)


def test_each_preset_can_be_written_axis_by_axis() -> None:
    for preset in PRESETS.values():
        table = {"preset": "own", **objective_table(preset.objective, refer=repr)}
        assert parse({"objective": table}).objective.resolve() == preset.objective, preset.name


def test_an_objective_that_equals_a_published_one_is_known_by_it() -> None:
    table = {"preset": "own", **objective_table(PRESETS["m2po"].objective, refer=repr)}
    assert parse({"objective": table}).objective.known == PRESETS["m2po"]


def test_every_class_of_an_axis_has_a_kind() -> None:
    import offbeat.objective.spec as spec

    named = {kind for kinds in KINDS.values() for kind in kinds.values() if kind}
    axes = {spec.Gate, spec.Weight, spec.Regularizer, spec.Truncate, spec.Reject, spec.GroupESS, spec.ExpWeight}
    classes = {one for axis in axes for one in getattr(axis, "__args__", (axis,)) if isinstance(one, type)}
    assert named == classes


def test_the_line_of_the_issue(tmp_path: Path) -> None:
    config = toml(tmp_path, '[objective]\ngate = {kind = "band", low = 0.2, high = 2.0}\n')
    assert config.objective.resolve().gate == TwoSide(0.2, 2.0)
    assert config.objective.resolve().advantage is Advantage.CENTRED  # the rest is the preset's


def test_all_axes_from_toml(tmp_path: Path) -> None:
    objective = toml(
        tmp_path,
        """
        updates_per_batch = 2
        [objective]
        preset = "own"
        gate = "centred-band"
        weight = {kind = "importance", cap = 2.0}
        ratio = "geometric"
        drop_surplus = true
        regularizers = [{kind = "squared-log-ratio", tau = 0.1, level = "token"}, {kind = "kl", coefficient = 0.01}]
        [objective.reject]
        kind = "group-ess"
        least = 0.25
        """,
    ).objective.resolve()
    assert objective == Objective(
        gate=CentredBand(), weight=Importance(2.0), ratio=Level.GEOMETRIC, drop_surplus=True,
        regularizers=(SquaredLogRatio(0.1, Level.TOKEN), KL(0.01)), reject=GroupESS(0.25),
    )  # fmt: skip


def test_an_axis_of_a_preset_can_be_switched_off() -> None:
    assert parse({"objective": {"preset": "sequence-mask", "reject": "none"}}).objective.resolve().reject is None
    assert parse({"objective": {"preset": "grpo", "gate": {"kind": "none"}}}).objective.resolve().gate == NoGate()


def test_constants_change_the_gate_that_is_set() -> None:
    config = parse({"objective": {"preset": "reinforce", "gate": "two-side", "clip": [0.1, 0.3]}})
    assert config.objective.resolve().gate == TwoSide(0.1, 0.3)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('gate = {kind = "bnad"}', "objective.gate = {'kind': 'bnad'} has kind 'bnad'; did you mean 'band'?"),
        (
            'gate = {kind = "band", hgih = 2.0}',
            "objective.gate = {'kind': 'band', 'hgih': 2.0} has 'hgih', which kind 'band' does not take; did you mean "
            "'high'?",
        ),
        (
            'weight = {kind = "importance", cap = -1}',
            "objective.weight = {'kind': 'importance', 'cap': -1} has cap = -1; it takes a number of at least 0",
        ),
        (
            'reject = {kind = "band", low = 0.5}',
            "objective.reject = {'kind': 'band', 'low': 0.5} has no 'high', which kind 'band' needs; write {kind = "
            "'band', high = …}",
        ),
        (
            'correction = {kind = "truncate", level = "tokn"}',
            "objective.correction = {'kind': 'truncate', 'level': 'tokn'} has level = 'tokn'; did you mean 'token'?",
        ),
        ('advantage = "centrd"', "objective.advantage = 'centrd' is not a choice; did you mean 'centred'?"),
        ("gate = 3", "objective.gate = 3 has kind 3; valid: none, one-side, two-side"),
        ('regularizers = [{kind = "kl"}]', "objective.regularizers = [{'kind': 'kl'}] has no 'coefficient'"),
        (
            'regularizers = {kind = "kl", coefficient = 1}',
            "objective.regularizers = {'kind': 'kl', 'coefficient': 1} is",
        ),
        ('gate = ["none"]', "objective.gate = ['none'] has kind ['none']; did you mean 'none'?"),
        (
            'gate = "none"\nratio = "geometric"',
            "objective.ratio = geometric: 'rec-oneside-nois' has neither a gate nor",
        ),
        ('prest = "grpo"', "objective.prest is not a setting; did you mean 'objective.preset'?"),
    ],
)
def test_problems_have_their_line_and_the_nearest_name(line: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        toml(tmp_path, f"steps = 3\n[objective]\n{line}\n")
    [found] = error.value.problems
    assert found.partition(": ")[2].startswith(problem)
    assert found.startswith(f"{tmp_path / 'run.toml'}:{3 + line.count(chr(10))}: ")


def test_a_centred_band_against_the_proximal_policy_is_a_problem_and_no_crash() -> None:
    [problem] = examine({"objective": {"gate": "centred-band", "against": "proximal"}}).problems
    assert problem.startswith("objective.against = 'proximal'")


def test_nobody_has_shown_the_lag_of_another_gate() -> None:
    config = parse(
        {"objective": {"preset": "reinforce", "gate": "two-side", "weight": "tapered"}, "sync": {"every": 50}}
    )
    assert config.objective.known.lag_evidence.startswith("nobody has shown")
    assert config.objective.known.name == "reinforce with other axes"
    assert parse({"objective": {"preset": "grpo", "epsilon": 0.1}}).objective.known == PRESETS["grpo"]


def test_a_name_alone_is_a_preset(tmp_path: Path) -> None:
    assert toml(tmp_path, 'objective = "dapo"\n').objective.preset == "dapo"
    with pytest.raises(ConfigError, match=r"run.toml:1: objective.preset = 'dapi' is not a preset; did you mean"):
        toml(tmp_path, 'objective = "dapi"\n')
    file = tmp_path / "run.toml"
    file.write_text('objective = "dapo"\n')
    assert load(file, ["objective.clip=[0.1, 0.1]"]).objective.preset == "dapo"
    assert load(file, ["objective=grpo"]).objective.preset == "grpo"


def test_an_objective_of_a_file_is_recorded_with_all_its_axes(own: Path, tmp_path: Path) -> None:
    config = toml(tmp_path, f'objective = "{own}:mine"\n')
    expected = Objective(OwnFunction(f"{own}:signs"), gate=OwnFunction(f"{own}:narrow"), baseline_shift=0.5)
    assert config.objective.resolve() == expected
    assert config.own_parts == [
        ("objective.preset", f"{own}:mine"),
        ("objective.advantage", f"{own}:signs"),
        ("objective.gate", f"{own}:narrow"),
    ]  # fmt: skip
    own.unlink()  # what is recorded can be read without the file, for instance by a report
    assert parse(config.model_dump(mode="json")) == config


def test_axes_change_an_objective_of_a_file(own: Path) -> None:
    objective = parse({"objective": {"preset": f"{own}:mine", "gate": "two-side", "truncated": "mask"}}).objective
    assert objective.resolve().gate == TwoSide()
    assert objective.truncated.value == "mask"
    assert parse({"objective": {"preset": f"{own}:plain", "clip": [0.1, 0.1]}}).objective.resolve().gate == (
        replaced(Objective(), low=0.1, high=0.1)
    )


def replaced(_: Objective, low: float, high: float) -> object:
    from offbeat.objective.spec import OneSide

    return OneSide(low, high)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("own.py:mien", "has no 'mien'; did you mean 'mine'?"),
        ("own.py:narrow", "is a function, not an Objective"),
        ("none.py:mine", "does not exist; give the path of a Python file"),
        ("no_such_module:mine", "no_such_module is no module; for a file write its path, ending in .py"),
    ],
)
def test_an_objective_that_cannot_be_loaded_is_a_problem(name: str, problem: str, own: Path) -> None:
    home = str(own.parent / name) if ".py" in name else name
    [found] = examine({"objective": home}).problems
    assert found.startswith(f"objective.preset = {home!r}: ")
    assert problem in found


def test_functions_of_your_own_are_called_where_built_in_ones_are(own: Path) -> None:
    ratios, push = torch.tensor([[0.95, 1.3]]), torch.tensor([[1.0]])
    gate = OwnFunction(f"{own}:narrow")
    assert passes(gate, ratios, push).tolist() == [[True, False]]
    assert importance_weights(lambda r, a: r**2, ratios, push).tolist() == [pytest.approx([0.9025, 1.69])]
    rewards, scored = torch.tensor([[2.0, -1.0, 3.0]]), torch.tensor([[True, True, False]])
    assert advantages(OwnFunction(f"{own}:signs"), rewards, scored).tolist() == [[1.0, -1.0, 0.0]]
    assert Objective(gate=gate).needs == Objective(gate=TwoSide()).needs


@pytest.mark.parametrize(
    ("gate", "problem"),
    [
        (lambda r, a: r, "the gate .*<lambda> returned torch.float32; it must return torch.bool"),
        (lambda r, a: (r > 1).any(), r"returned shape \[\]; it must return a tensor of shape \[1, 2\]"),
        (lambda r, a: None, r"returned NoneType; it must return a tensor"),
    ],
)
def test_a_gate_that_returns_something_else_ends_with_a_sentence(gate: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        passes(gate, torch.ones(1, 2), torch.ones(1, 1))


def test_an_advantage_of_nan_ends_with_a_sentence() -> None:
    with pytest.raises(ValueError, match="returned NaN or infinity; check for a division by zero"):
        advantages(lambda r, s: r / 0, torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool))


def test_the_table_of_an_objective_has_every_field() -> None:
    assert objective_table(Objective(), refer=repr).keys() == {field.name for field in fields(Objective)}
