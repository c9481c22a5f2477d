"""reasoning_gym: the answer of each generator scores in full after a round trip through JSON, and others do not."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("reasoning_gym")

from reasoning_gym.factory import DATASETS

from offbeat.errors import TaskError
from offbeat.scoring.pool import ScoringPool
from offbeat.tasks.reasoning_gym import answer_of, generators, reasoning_gym, score
from offbeat.types import Score

# The library does not close its files.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

ALL = sorted(set(DATASETS) - {"composite"})  # composite combines the others
SOME = [
    "arc_agi",
    "basic_arithmetic",
    "countdown",
    "family_relationships",
    "leg_counting",
    "rearc",
    "sudoku",
    "word_ladder",
]


def _own_answers_score_in_full(generator: str) -> None:
    for example in reasoning_gym(generator=generator, size=2, seed=1).examples:
        stored = json.loads(json.dumps(dict(example.columns)))
        if stored["answer"] is None:
            continue  # the generator can check answers but has none
        assert score(f"I think <answer>{stored['answer']}</answer>", stored, generator=generator) == 1.0, generator


@pytest.mark.parametrize("generator", SOME)
def test_a_generators_own_answer_scores_in_full(generator: str) -> None:
    _own_answers_score_in_full(generator)


@pytest.mark.engine
@pytest.mark.parametrize("generator", ALL)
def test_every_generators_own_answer_scores_in_full(generator: str) -> None:
    _own_answers_score_in_full(generator)


def test_it_scores_in_the_pool_and_wrong_answers_get_less() -> None:
    task = reasoning_gym(generator="leg_counting", size=5)
    example = task.examples[0]
    with ScoringPool.of(task, workers=1) as pool:
        right, wrong, none = pool.score_all(
            (text, example.record)
            for text in (f"<answer>{example.columns['answer']}</answer>", "<answer>x</answer>", "<answer>")
        )
    assert right == Score(1.0, {"score": 1.0})
    assert isinstance(wrong, Score) and wrong.reward < 0.1 and none == Score(0.0, {"score": 0.0})


def test_the_last_answer_counts() -> None:
    assert answer_of("<answer>1</answer> no <answer>2</answer>") == "2" and answer_of("") is None


def test_a_difficulty_reaches_the_generator_and_a_wrong_name_gets_a_hint() -> None:
    hard = reasoning_gym(generator="leg_counting", size=1, settings={"min_animals": 9, "max_animals": 9}).examples[0]
    assert "['num_animals', 9]" in str(hard.columns["entry"])
    with pytest.raises(TaskError, match="did you mean 'leg_counting'"):
        reasoning_gym(generator="leg_countin")


def test_the_names_read_from_the_source_are_the_registered_ones() -> None:
    assert generators() == DATASETS.keys()


def test_a_wrong_name_gets_a_hint_without_importing_reasoning_gym() -> None:
    program = (
        "import sys; from offbeat.tasks.task import make\n"
        "try: make('reasoning_gym', {'generator': 'leg_countin'})\n"
        "except ValueError as error: print('reasoning_gym' in sys.modules, error)"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.startswith("False") and "did you mean 'leg_counting'" in printed
