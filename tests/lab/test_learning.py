"""The learning figures rest on an exact pass rate, on promises computed by the library, and on real runs."""

import math
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from lab.learning import model as sums_model
from lab.learning.cells import OFFLINE_ONLINE, Cell, drift, fixed, run
from lab.learning.rows import RATES, REPORTED, TUNING, Row, best_rate
from lab.learning.task import task
from lab.learning.watched_learner import ExactPassRate, promised
from offbeat.types import Completion, Group, Prompt, Score, VersionSpan
from tests.fixtures.tiny_model import load_tokenizer, save_llama, save_tokenizer


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
    """Return log π(completion | prompt), computed token by token."""
    total = 0.0
    for place, token in enumerate(completion):
        logits = model(torch.tensor([prompt + completion[:place]])).logits[0, -1]
        total += float(logits.log_softmax(-1)[token])
    return total


def test_the_pass_rate_is_the_probability_of_the_answer_and_its_end(place: Path, model: LlamaForCausalLM) -> None:
    tokenizer = load_tokenizer(place)
    rates = ExactPassRate.of(tokenizer).pass_rates(model)
    assert len(rates) == 100
    for n in (0, 57, 99):
        example = task.examples[n]
        answer = [*tokenizer.encode(str(example.columns["answer"])), tokenizer.eos_token_id]
        expected = math.exp(chain(model, tokenizer.encode(str(example.prompt)), answer))
        assert float(rates[n]) == pytest.approx(expected, rel=1e-4)


def group(model: LlamaForCausalLM, ratios: tuple[float, float]) -> Group:
    """Return two completions, the first one right, whose behavior probabilities are π(y) / ratio."""
    prompt = [5, 13, 6]
    written = [[7, 1], [8, 1]]
    behavior = [chain(model, prompt, y) - math.log(ratio) for y, ratio in zip(written, ratios, strict=True)]
    return Group(
        "g",
        Prompt("0+0", prompt, "sums"),
        tuple(
            Completion(f"g/{i}", y, [b / 2, b / 2], (VersionSpan(0, 0, 2),), score=Score(float(i == 0)))
            for i, (y, b) in enumerate(zip(written, behavior, strict=True))
        ),
    )


def test_a_promise_is_the_predicted_gain_and_the_bound_without_drift_between_versions(model: LlamaForCausalLM) -> None:
    found = promised(model, [group(model, (1.2, 0.8)), group(model, (1.0, 1.0))], torch.zeros(3))
    assert found["gain"][0] == pytest.approx((0.2 + 0.0) / 2, abs=1e-4)  # 2 · (0.5·1.2·0.5 - 0.5·0.8·0.5)
    assert found["normalized"][0] == pytest.approx((2 * (1.2 / 2 - 0.5) + 0.0) / 2, abs=1e-4)
    sigma = math.sqrt(0.25 + 1e-4)
    surrogate, tv = (0.5 * 1.2 * 0.5 - 0.5 * 0.8 * 0.5) / sigma, 0.1
    paper = surrogate - 2 * (1 - sigma) / sigma * tv
    assert found["bound_paper"][0] == pytest.approx(paper / 2, abs=1e-4)
    assert found["realised"] == [0.0, 0.0]


def test_each_arm_has_the_rate_that_did_best_on_the_tuning_seeds() -> None:
    finals = {(rate, seed): 0.5 for rate in RATES for seed in TUNING}
    best = RATES[1]
    finals[best, TUNING[0]] = 0.6
    done = {("v1", rate, seed): {"final": final} for (rate, seed), final in finals.items()}
    done["v1", RATES[0], REPORTED[0]] = {"final": 1.0}  # must not count
    assert best_rate("v1", done) == best


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs start with a model that has seen enough sums to be right sometimes."""
    save_tokenizer(tmp_path)
    sums_model.pretrain(tmp_path, batches=150).save_pretrained(tmp_path)
    monkeypatch.setattr(sums_model, "directory", lambda: tmp_path)


@pytest.mark.engine
@pytest.mark.usefixtures("trained")
def test_a_cell_is_a_real_run_and_its_row_is_complete() -> None:
    row = run(Cell(drift(1e-6), 1e-3, seed=3, steps=10))
    assert set(row) == set(Row.__annotations__)
    assert row["publishes"] == 5  # drift is 0 at lag 0, so the smallest budget publishes every other step
    assert all("unseen" in one for one in row["published"][1:])
    assert set(row["curve"]) == {"0", "5", "10"}


@pytest.mark.engine
@pytest.mark.usefixtures("trained")
def test_a_fixed_arm_computes_promises_only_for_publishes_that_happen() -> None:
    row = run(Cell(fixed(5), 1e-3, seed=3, steps=10))
    assert [one["step"] for one in row["published"]] == [0, 5, 10]
    assert set(row["by_lag"]) == {"0", "1", "2-3", "4-7"}
    assert 80 < row["groups"] <= 160, "groups of equal rewards are drawn and not trained on"


@pytest.mark.engine
@pytest.mark.usefixtures("trained")
def test_offline_then_online_trains_on_foreign_groups_and_half_as_many_fresh_ones() -> None:
    row = run(Cell(OFFLINE_ONLINE, 1e-3, seed=3, steps=20))
    assert set(row["curve"]) == {"0", "5", "10", "15", "20"}
    assert 40 < row["groups"] <= 10 * 8
