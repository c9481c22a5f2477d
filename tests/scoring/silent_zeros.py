"""Ways in which a stored reward could be 0 without the reward function having said 0.

A way is closed if it ends the run with a sentence, if the completion has no score, or if it has the reward that was
meant. It is visible if `offbeat view` shows the 0 as the answer's fault; events and report count these.
"""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from offbeat.errors import InvalidReward, TaskError
from offbeat.evaluation import Attempts, evaluate
from offbeat.experience.feedback import Deadline
from offbeat.experience.importing.importer import import_into, layout_of, read_groups
from offbeat.experience.importing.records import find_records
from offbeat.experience.importing.shapes import ImportDefaults
from offbeat.experience.log import ExperienceLog
from offbeat.experience.schema import reward_figures
from offbeat.experience.validation import ValidationRules
from offbeat.objective.credit import assign_credit
from offbeat.objective.spec import CutOff, Objective
from offbeat.reports.groups import describe_score
from offbeat.scoring.pool import Outcome, ScoringPool
from offbeat.tasks.rewards import Answers, Reward, reward_of
from offbeat.tasks.task import Task
from offbeat.types import UNKNOWN, Completion, Group, Prompt, Score, Unscorable
from tests.fixtures.attacks.odd_rewards import ANSWERS, COLUMNS, Odd

CLOSED, VISIBLE, SILENT = "closed", "visible", "SILENT"


def scored(odd: Odd) -> list[Outcome] | str:
    """Return what becomes of both answers in the scoring pool, or the sentence that ends the run."""
    settings = {"deadline": 5.0, "memory_mib": 1024, "answer_fault": "floor"} | odd.settings
    rewards = [one if isinstance(one, Reward) else reward_of(one) for one in odd.rewards]
    try:
        task = Task(
            "odd", [], tuple(rewards), odd.reward_range, settings["deadline"],  # type: ignore[arg-type]
            answer_fault=settings["answer_fault"],  # type: ignore[arg-type]
        )  # fmt: skip
        with ScoringPool.of(task, workers=1, memory_mib=settings["memory_mib"]) as pool:  # type: ignore[arg-type]
            return pool.score_group(Answers(ANSWERS, COLUMNS)).result(timeout=600)
    except (InvalidReward, TaskError) as error:
        return str(error)


def came_to(odd: Odd, found: list[Outcome] | str) -> bool:
    """Return True if that is what the functions mean."""
    if isinstance(odd.expected, str) or isinstance(found, str):
        return isinstance(odd.expected, str) and isinstance(found, str) and found.startswith(odd.expected)
    rewards = [one.reward if isinstance(one, Score) else None for one in found]
    faults = tuple(one.fault if isinstance(one, Score) else "" for one in found)
    return rewards == odd.expected and faults == odd.faults


def verdict(found: list[Outcome] | str, meant: bool) -> str:
    """Say whether a way to a zero is closed, visible, or neither."""
    if not meant:
        return SILENT
    if not isinstance(found, str) and any(isinstance(one, Score) and one.fault for one in found):
        shown = all(
            "the answer's fault" in describe_score(one) for one in found if isinstance(one, Score) and one.fault
        )
        return VISIBLE if shown else SILENT
    return CLOSED


def _group(score: Score | Unscorable | None, *others: Score | Unscorable | None) -> Group:
    answers = tuple(
        Completion(f"a{i}", np.array([4, i], np.int32), UNKNOWN, source="human", score=one)
        for i, one in enumerate([score, *others])
    )
    return Group("t1", Prompt(id="p", token_ids=np.array([1], np.int32), task="support"), answers)


def _stored(log: ExperienceLog) -> list[Score | Unscorable | None]:
    return [one.score for group in log.groups() for one in group.completions]


def _feedback(place: Path, value: object) -> bool:
    """Return True if a late score of this value leaves the completion without one."""
    with ExperienceLog.open(place) as log:
        log.append([_group(None)])
        log.feedback([{"completion_id": "a0", "score": value}])
        return _stored(log) == [None]


def _no_feedback(place: Path) -> bool:
    with ExperienceLog.open(place) as log:
        log.append([_group(None)])
        log.give_up(Deadline(0.0), now=1e12)
        return isinstance(_stored(log)[0], Unscorable)


def _imported(place: Path, **row: object) -> bool:
    """Return True if an imported completion with this reward has none, or is refused."""
    file = place / "rows.jsonl"
    file.write_text(
        "".join(
            json.dumps({"prompt": [1], "response": [4, i], "reward": 1.0} | (row if i else {})) + "\n" for i in (0, 1)
        )
    )
    records = find_records(str(file))
    with ExperienceLog.open(place / "log") as log:
        found = read_groups(records, layout_of(records), ImportDefaults(task="t", source="s"))
        import_into(log, found, rules=ValidationRules())
        return Score(0.0) not in [replace(one, breakdown={}) if isinstance(one, Score) else one for one in _stored(log)]


def _out_of_range_in_log(place: Path) -> bool:
    with ExperienceLog.open(place, rules=ValidationRules(reward_ranges={"support": (0.0, 1.0)})) as log:
        return bool(log.append([_group(Score(5.0))]).refused) and _stored(log) == []


def _credit(truncated: bool) -> bool:
    """Return True if a completion without a score, or one that is masked, is not trained on and moves no baseline."""
    rewards, scored_BG = torch.tensor([[1.0, 0.0, 0.5]]), torch.tensor([[True, truncated, True]])
    objective = Objective(truncated=CutOff.MASK if truncated else CutOff.SCORE)
    cut = torch.tensor([[False, True, False]])
    credit = assign_credit(objective, rewards, scored_BG, torch.ones(1, 3), truncated_BG=cut if truncated else None)
    return not bool(credit.trained_BG[0, 1]) and math.isclose(float(credit.advantages_BG[0, 0]), 0.25)


def _evaluated() -> bool:
    [row] = evaluate([Attempts("a", "all", [1.0, None], greedy=None)])
    return row.unscorable == 1 and row.estimates["mean reward"].value == 1.0 and "greedy pass@1" not in row.estimates


def _described() -> bool:
    return (
        reward_figures([Unscorable("timeout"), None]) == (0, None, None)
        and describe_score(Unscorable("timeout")) == "unscorable: timeout"
        and describe_score(None) == "waiting for feedback"
    )


ELSEWHERE: dict[str, Callable[[Path], bool]] = {
    "a late score that is null": lambda place: _feedback(place, None),
    "a late score that is empty text": lambda place: _feedback(place, ""),
    "a late score that is a text": lambda place: _feedback(place, "no"),
    "a late score that is NaN": lambda place: _feedback(place, float("nan")),
    "a late score that is a list": lambda place: _feedback(place, [0]),
    "feedback that never comes": _no_feedback,
    "an imported row without a reward": lambda place: _imported(place, reward=None),
    "an imported reward that is empty text": lambda place: _imported(place, reward=""),
    "an imported reward that is a text": lambda place: _imported(place, reward="0"),
    "an imported reward that is NaN": lambda place: _imported(place, reward=float("nan")),
    "an imported reward that is false text": lambda place: _imported(place, reward="false"),
    "a reward outside the range of its task in a log": _out_of_range_in_log,
    "a completion without a score in the baseline": lambda _: _credit(truncated=False),
    "a masked completion in the baseline": lambda _: _credit(truncated=True),
    "a completion without a score in evaluation": lambda _: _evaluated(),
    "means and words of groups without a score": lambda _: _described(),
}
"""Ways apart from the scoring pool: True if closed."""
