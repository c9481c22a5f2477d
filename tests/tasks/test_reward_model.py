"""A reward model from a directory: the classifier's own logit, and no code, pickles or invented weights."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from offbeat.errors import TaskError
from offbeat.tasks.capture import write_task
from offbeat.tasks.reward_model import reward_model
from offbeat.tasks.rewards import Answers, Reward
from offbeat.tasks.task import custom
from tests.fixtures.judge import save_judge
from tests.fixtures.tiny_model import load_tokenizer, save_model, save_tokenizer


@pytest.fixture
def judge(tmp_path: Path) -> Path:
    return save_judge(tmp_path / "judge")


def logit(judge: Path, text: str) -> float:
    model = AutoModelForSequenceClassification.from_pretrained(str(judge)).eval()
    with torch.inference_mode():
        return float(model(torch.tensor([load_tokenizer(judge).encode(text)])).logits[0, 0])


def test_the_reward_is_the_logit_of_prompt_and_completion(judge: Path) -> None:
    reward = reward_model(judge, weight=0.5)
    assert (reward.name, reward.weight, reward.trl) == ("judge", 0.5, True)
    found = reward.on(Answers(["42", "4242, or so"], {"prompt": "17+25="}))
    assert found == pytest.approx([logit(judge, "17+25=42"), logit(judge, "17+25=4242, or so")], abs=1e-5)


def test_a_chat_goes_through_the_models_own_template(judge: Path) -> None:
    save_tokenizer(judge, chat=True)
    [found] = reward_model(judge).on(Answers(["42"], {"prompt": [{"role": "user", "content": "17+25"}]}))
    assert found == pytest.approx(logit(judge, "<17+25><42>"), abs=1e-5)


def test_a_directory_is_a_reward_and_is_written_into_the_task_file(judge: Path, tmp_path: Path) -> None:
    [reward] = custom(path=str(write_task(tmp_path / "task", str(judge), ["17+25="]))).rewards
    assert isinstance(reward, Reward) and reward.name == "judge" and reward.setup is not None
    assert reward("42", {"prompt": "17+25="}) == pytest.approx(logit(judge, "17+25=42"), abs=1e-5)


def test_what_is_no_reward_model_is_refused_with_a_sentence(judge: Path, tmp_path: Path) -> None:
    save_model(tmp_path / "policy")
    with pytest.raises(TaskError, match="holds a LlamaForCausalLM with 2 labels; a reward model is"):
        reward_model(tmp_path / "policy")
    with pytest.raises(TaskError, match="'nowhere' is neither the directory of a model nor"):
        reward_model("nowhere")
    (judge / "modeling.py").write_text("")
    with pytest.raises(TaskError, match=r"it brings code \(modeling.py\), which offbeat never runs"):
        reward_model(judge)
    (judge / "modeling.py").unlink()
    (judge / "model.safetensors").rename(judge / "pytorch_model.bin")
    with pytest.raises(TaskError, match=r"pytorch_model.bin would have to be unpickled"):
        reward_model(judge)


def test_weights_that_transformers_would_invent_are_refused(judge: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(judge / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, judge / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TaskError, match=r"lack score.weight, so its rewards would be random"):
        reward_model(judge).on(Answers(["42"], {"prompt": "17+25="}))
    config = json.loads((judge / "config.json").read_text())
    (judge / "config.json").write_text(json.dumps(config | {"id2label": {"0": "bad", "1": "good"}}))
    with pytest.raises(TaskError, match="with 2 labels"):
        reward_model(judge)
