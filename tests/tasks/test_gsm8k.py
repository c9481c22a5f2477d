"""GSM8K: references are accepted in every spelling, and other numbers are not."""

import json
import random
from decimal import Decimal
from pathlib import Path

import pytest

from offbeat.errors import TaskError
from offbeat.scoring.pool import ScoringPool
from offbeat.tasks.gsm8k import correct, examples, gsm8k, reference_answer
from offbeat.tasks.task import make
from offbeat.types import Score
from tests.fixtures.gsm8k_spellings import SPELLINGS, Spelling, altered

DATA = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
JANET = {"question": "How much does she make?", "answer": "She makes 9 * 2 = $<<9*2=18>>18.\n#### 18"}


@pytest.fixture(scope="module")
def references() -> list[str]:
    file = DATA / "test.jsonl"
    if not file.is_file():
        pytest.skip("GSM8K is not at ../shared/data/gsm8k")
    return [reference_answer(json.loads(line)["answer"]) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: s.name)
def test_each_spelling_of_the_references_is_accepted(spelling: Spelling, references: list[str]) -> None:
    for reference in references[::5]:
        text = spelling.write(Decimal(reference.replace(",", "")))
        assert correct(text, {"answer": reference}) == 1.0, text


def test_altered_answers_are_wrong(references: list[str]) -> None:
    answers, rng = [Decimal(reference.replace(",", "")) for reference in references], random.Random(0)
    for at in range(0, len(answers), 5):
        for name, value in altered(answers, at, rng).items():
            text = rng.choice(SPELLINGS).write(value)
            assert correct(text, {"answer": references[at]}) == 0.0, f"{name}: {text} for {references[at]}"


def test_the_task_reads_a_file_and_the_pool_scores_it(tmp_path: Path) -> None:
    file = tmp_path / "two.jsonl"
    file.write_text("\n".join(json.dumps(JANET) for _ in range(2)))
    task = make("gsm8k", {"source": str(file)})
    assert len(task.examples) == 2 and task.examples[1].id == "gsm8k-1"
    assert task.answer is not None and task.answer("#### $18.00") == "18"
    with ScoringPool.of(task, workers=1) as pool:
        outcomes = pool.score_all([(text, task.examples[0].record) for text in ("#### 18", "#### 17 18")])
    assert outcomes == [Score(1.0, {"correct": 1.0}), Score(0.0, {"correct": 0.0})]


def test_the_question_ends_in_the_instruction() -> None:
    [found] = examples([JANET], instruction="Be brief.")
    assert found.prompt == ({"role": "user", "content": "How much does she make?\n\nBe brief."},)


def test_a_solution_without_an_answer_is_an_error() -> None:
    with pytest.raises(TaskError, match="ends in '#### <number>'"):
        list(examples([{"question": "?", "answer": "It is 18."}]))


def test_the_data_is_read_on_first_use() -> None:
    task = gsm8k(source="nowhere.jsonl")
    with pytest.raises(TaskError, match=r"nowhere\.jsonl does not exist"):
        len(task.examples)
