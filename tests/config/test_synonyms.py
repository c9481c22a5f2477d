"""A name of another tool, a word of habit or a typo leads to the setting that was meant."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from offbeat.config import examine
from offbeat.config.knobs import knobs, place, suggest_setting, synonyms


@pytest.mark.parametrize(
    ("key", "setting"),
    [
        ("optimizer.lr", "optimizer.learning_rate"),
        ("lr", "optimizer.learning_rate"),
        ("trainer.lr", "optimizer.learning_rate"),
        ("trainer.learning_rate", "optimizer.learning_rate"),
        ("sampling.max_new_tokens", "sampling.max_tokens"),
        ("max_completion_length", "sampling.max_tokens"),
        ("num_generations", "group_size"),
        ("rollout.n", "group_size"),
        ("actor_rollout_ref.rollout.n", "group_size"),
        ("clip_ratio_high", "objective.clip"),
        ("epsilon", "objective.clip"),
        ("learning_rte", "optimizer.learning_rate"),
        ("num_generatons", "group_size"),
        ("groupsize", "group_size"),
        ("sync_every", "sync.every"),
        ("sampler_.mode", "sampler.mode"),
        ("optimiser.learning_rate", "optimizer.learning_rate"),
        ("driftt", "sync.drift_budget"),
        ("checkpoint.every", "trainer.save_every"),
    ],
)
def test_a_key_that_is_not_a_setting_leads_to_the_one_that_was_meant(key: str, setting: str) -> None:
    assert suggest_setting(key).startswith(f"did you mean {setting!r}")


def test_names_of_another_tool_are_explained_one_by_one_even_in_tables_that_we_do_not_have() -> None:
    theirs = {"actor_rollout_ref": {"rollout": {"n": 5, "temperature": 0.9}, "actor": {"clip_ratio_high": 0.28}}}
    assert examine({**theirs, "optimizer": {"lr": 1e-5}}).problems == [
        "optimizer.lr is not a setting; did you mean 'optimizer.learning_rate'?",
        "actor_rollout_ref.rollout.n is not a setting; did you mean 'group_size'?",
        "actor_rollout_ref.rollout.temperature is not a setting; did you mean 'sampling.temperature'?",
        "actor_rollout_ref.actor.clip_ratio_high is not a setting; did you mean 'objective.clip'? It is the second "
        "number: objective.clip = [0.2, 0.28].",
    ]


def test_a_table_with_a_typo_is_one_problem_and_its_settings_are_not() -> None:
    data = {"optimiser": {"learning_rate": 1e-5, "floor": 0.1}, "task": {"optoins": {"digits": 2}}}
    assert examine(data).problems == [
        "task.optoins is not a setting; did you mean 'task.options'?",
        "optimiser is not a setting; did you mean 'optimizer'?",
    ]


def test_a_table_inside_a_table_is_not_a_typo_of_a_number() -> None:
    assert examine({"trainer": {"ckpt": {"interval": 5}}}).problems == [
        "trainer.ckpt.interval is not a setting; did you mean 'trainer.save_every'?"
    ]


def test_a_name_without_an_equivalent_says_why() -> None:
    assert examine({"gamma": 0.99}).problems == [
        "gamma is not a setting; there is no such setting here. A completion has one reward; nothing is discounted."
    ]


def test_nothing_similar_lists_what_the_table_has() -> None:
    assert suggest_setting("reference.blub") == "valid: refresh_every"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"objective": {"clip": 0.2}}, "objective.clip = 0.2 is not a list of 2 numbers; write [0.2, 0.2]"),
        ({"objective": {"clip": []}}, "objective.clip = [] is not a list of 2 numbers; write two"),
        ({"objective": {"clip": [0.3]}}, "objective.clip = [0.3] is not a list of 2 numbers; write [0.3, 0.3]"),
        ({"optimizer": {"betas": 0.9}}, "optimizer.betas = 0.9 is not a list of 2 numbers; write [0.9, 0.999]"),
        ({"run": {"sinks": "wandb"}}, "run.sinks = 'wandb' is not a list; write [\"wandb\"]"),
    ],
)
def test_one_value_for_a_list_says_how_to_write_the_list(data: dict[str, object], says: str) -> None:
    assert examine(data).problems == [says]


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("learning_rate", "optimizer.learning_rate"),
        ("max_tokens", "sampling.max_tokens"),
        ("temperature", "sampling.temperature"),
        ("mode", "run.mode"),
        ("every", "sync.every"),
        ("group_size", "group_size"),
        ("sync", "sync"),
        ("sync.every", "sync.every"),
        ("num_generations", "group_size"),
        ("beta", "objective.kl_coefficient"),
        ("epsilon", None),  # objective.epsilon exists, but whoever writes epsilon=0.2 means the clip
        ("per_device_train_batch_size", None),
        ("learning_rte", None),
    ],
)
def test_a_flat_name_has_one_place_or_none(name: str, setting: str | None) -> None:
    assert place(name) == setting


def test_every_synonym_names_a_setting_or_says_why_there_is_none() -> None:
    wrong = [one.name for one in synonyms().values() if (one.setting or not one.note) and one.setting not in knobs()]
    assert not wrong
    assert all(one.note.endswith(".") for one in synonyms().values() if one.note)


def test_a_setting_is_never_a_synonym_of_another_one_at_the_same_place() -> None:
    same = {name: one.setting for name, one in synonyms().items() if name in knobs() and one.setting != name}
    assert not same


def test_every_field_of_the_installed_trl_is_known() -> None:
    if (found := find_spec("trl")) is None or found.origin is None:
        pytest.skip("TRL is a requirement of the lab")
    source = Path(found.origin).parent / "trainer" / "grpo_config.py"
    [config] = [node for node in ast.parse(source.read_text()).body if getattr(node, "name", "") == "GRPOConfig"]
    assert isinstance(config, ast.ClassDef)
    fields = {
        line.target.id for line in config.body if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }
    assert "num_generations" in fields and fields - synonyms().keys() == set()
