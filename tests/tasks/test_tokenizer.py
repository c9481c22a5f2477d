"""Variables of the chat template: their values reach whatever applies it, and unknown names are refused."""

from pathlib import Path

import pytest

from offbeat.config import parse
from offbeat.errors import ConfigError, ModelUnreadable
from offbeat.from_python import placed
from offbeat.preflight.checks import preflight
from offbeat.run.build import load_tokenizer as tokenizer_of
from offbeat.tasks.data import tokens
from offbeat.tasks.tokenizer import read_tokenizer, with_defaults
from tests.fixtures.tiny_model import load_tokenizer, save_model, save_tokenizer

ASKED = ({"role": "user", "content": "1+1"},)
THINKING = (
    "{% macro end() %}{% if enable_thinking %}?{% else %}.{% endif %}{% endmacro %}"
    "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if effort is defined %}{{ effort.low }}{% endif %}"
    "{{ end() }}"
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model whose template asks whether to think, inside a macro and outside."""
    save_model(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    tokenizer = load_tokenizer(tmp_path / "model")
    tokenizer.chat_template = THINKING
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_setting_reaches_prompts_and_stays_in_what_is_saved(model: Path, tmp_path: Path) -> None:
    config = parse(placed({"chat_template_kwargs": {"enable_thinking": True}, "model": {"path": str(model)}}))
    tokenizer = tokenizer_of(config)
    assert tokenizer.decode(tokens(ASKED, tokenizer)) == "1+1?"
    assert tokenizer.decode(tokens(ASKED, tokenizer_of(parse({"model": {"path": str(model)}})))) == "1+1."
    tokenizer.save_pretrained(tmp_path / "run")  # what a run stores, and `offbeat export` copies
    saved = read_tokenizer(tmp_path / "run")
    assert saved.decode(tokens(ASKED, saved)) == "1+1?"
    own = [dict(message) for message in ASKED]
    assert saved.apply_chat_template(own, tokenize=False, enable_thinking=False) == "1+1."
    again = read_tokenizer(tmp_path / "run", {"enable_thinking": False})
    assert again.decode(tokens(ASKED, again)) == "1+1."


def test_values_may_be_any_json(model: Path) -> None:
    for value in ('a "quoted" \\\\ \n é😀', [1, None, -2.5e-7], {"low": True}):
        found = read_tokenizer(model, {"effort": value, "enable_thinking": True})
        found.chat_template = found.chat_template.split("{% macro")[0] + "{{ effort == wanted }}"
        assert found.apply_chat_template([dict(ASKED[0])], tokenize=False, wanted=value) == "True", value


def test_several_templates_get_the_values_each(model: Path) -> None:
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = {"default": THINKING, "tool_use": THINKING}
    tokenizer.save_pretrained(model)
    found = read_tokenizer(model, {"enable_thinking": True}).chat_template
    assert found == dict.fromkeys(("default", "tool_use"), with_defaults(THINKING, {"enable_thinking": True}))


def test_a_variable_that_the_template_does_not_have_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelUnreadable, match="no variable 'enable_thinkin'; did you mean 'enable_thinking'"):
        read_tokenizer(model, {"enable_thinkin": False})
    save_tokenizer(tmp_path / "plain")
    with pytest.raises(ModelUnreadable, match="has no chat template, so chat_template_kwargs has no effect"):
        read_tokenizer(tmp_path / "plain", {"enable_thinking": False})
    config = parse({"model": {"path": str(model), "chat_template_kwargs": {"thinking_on": 1}}})
    assert any("model.chat_template_kwargs" in one and "no variable 'thinking_on'" in one for one in preflight(config))
    for name in ("messages", "a b"):
        with pytest.raises(ModelUnreadable, match=f"no variable '{name}'"):
            read_tokenizer(model, {name: 1})


@pytest.mark.parametrize("value", [float("nan"), {1}, object()])
def test_values_that_cannot_be_recorded_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"model\.chat_template_kwargs"):
        parse({"model": {"chat_template_kwargs": {"x": value}}})
