"""The learning figures stand on a yardstick that is exact, on promises that are the library's, and on real runs."""

import math
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from lab.fixtures.tiny_model import load_tokenizer, save_llama, save_tokenizer
from lab.learning import model as learning_model
from lab.learning import rows as learning_rows
from lab.learning.cells import OFFLINE_ONLINE, Cell, drift, fixed, run
from lab.learning.task import task
from lab.learning.yardstick import Yardstick, promised
from offbeat.types import Completion, Group, Prompt, Score, VersionSpan


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    save_llama(place, tied=False)
    return place


@pytest.fixture(scope="module")
def model(place: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(place, dtype=torch.float32)


@torch.no_grad()
def chain(model: LlamaForCausalLM, prompt: list[int], completion: list[int]) -> float:
    """log π(completion | prompt), a token at a time."""
    total = 0.0
    for place, token in enumerate(completion):
        logits = model(torch.tensor([prompt + completion[:place]])).logits[0, -1]
        total += float(logits.log_softmax(-1)[token])
    return total


def test_the_pass_rate_is_the_probability_of_the_answer_and_its_end(place: Path, model: LlamaForCausalLM) -> None:
    tokenizer = load_tokenizer(place)
    rates = Yardstick.of(tokenizer).pass_rates(model)
    assert len(rates) == 100
    for n in (0, 57, 99):
        example = task.examples[n]
        answer = [*tokenizer.encode(str(example.columns["answer"])), tokenizer.eos_token_id]
        expected = math.exp(chain(model, tokenizer.encode(str(example.prompt)), answer))
        assert float(rates[n]) == pytest.approx(expected, rel=1e-4)


def group(model: LlamaForCausalLM, ratios: tuple[float, float]) -> Group:
    """Two completions, the first right, that the behavior policy wrote with π(y)/ratio."""
    prompt = [5, 13, 6]
    written = [[7, 1], [8, 1]]
    behavior = [chain(model, prompt, y) - math.log(ratio) for y, ratio in zip(written, ratios, strict=True)]
    return Group(
        "g",
        Prompt("p", prompt, "sums"),
        tuple(
            Completion(f"g/{i}", y, [b / 2, b / 2], (VersionSpan(0, 0, 2),), score=Score(float(i == 0)))
            for i, (y, b) in enumerate(zip(written, behavior, strict=True))
        ),
    )


def test_a_promise_is_the_predicted_gain_and_the_bound_with_nothing_between_versions(model: LlamaForCausalLM) -> None:
    found = promised(model, [group(model, (1.2, 0.8)), group(model, (1.0, 1.0))], torch.zeros(3))
    assert found["gain"][0] == pytest.approx((0.1 + 0.0) / 2, abs=1e-4)  # 0.5·1.2·0.5 - 0.5·0.8·0.5
    sigma = math.sqrt(0.25 + 1e-4)
    surrogate, tv = (0.5 * 1.2 * 0.5 - 0.5 * 0.8 * 0.5) / sigma, 0.1
    paper = surrogate - 2 * (1 - sigma) / sigma * tv
    assert found["bound_paper"][0] == pytest.approx(paper / 2, abs=1e-4)
    assert found["realised"] == [0.0, 0.0]


def test_each_arm_has_the_rate_that_did_best_on_the_tuning_seeds() -> None:
    finals = {(rate, seed): 0.5 for rate in learning_rows.RATES for seed in learning_rows.TUNING}
    best = learning_rows.RATES[1]
    finals[best, learning_rows.TUNING[0]] = 0.6
    done = {("v1", rate, seed): {"final": final} for (rate, seed), final in finals.items()}
    done["v1", learning_rows.RATES[0], learning_rows.REPORTED[0]] = {"final": 1.0}  # must not count
    assert learning_rows.best_rate("v1", done) == best


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs begin with a model that has seen enough sums to be right now and then."""
    save_tokenizer(tmp_path)
    learning_model.pretrain(tmp_path, batches=150).save_pretrained(tmp_path)
    monkeypatch.setattr(learning_model, "directory", lambda: tmp_path)


@pytest.mark.engine
@pytest.mark.usefixtures("trained")
def test_a_cell_is_a_real_run_and_its_row_is_complete() -> None:
    row = run(Cell(drift(1e-6), 1e-3, seed=3, steps=10))
    assert set(row) == set(learning_rows.Row.__annotations__)
    assert row["publishes"] == 5  # drift is 0 at lag 0, so that the smallest budget publishes every other step
    assert all("unseen" in one for one in row["published"][1:])
    assert set(row["curve"]) == {"0", "5", "10"}


@pytest.mark.engine
@pytest.mark.usefixtures("trained")
def test_a_fixed_arm_asks_only_publishes_that_come() -> None:
    row = run(Cell(fixed(5), 1e-3, seed=3, steps=10))
    assert [one["step"] for one in row["published"]] == [0, 5, 10]
    assert set(row["by_lag"]) == {"0", "1", "2-3", "4-7"}
    assert row["groups"] == 160


@pytest.mark.engine
@pytest.mark.usefixtures("trained")
def test_offline_then_online_trains_on_foreign_groups_and_half_as_many_fresh_ones() -> None:
    row = run(Cell(OFFLINE_ONLINE, 1e-3, seed=3, steps=20))
    assert set(row["curve"]) == {"0", "5", "10", "15", "20"}
    assert row["groups"] == 10 * 8
