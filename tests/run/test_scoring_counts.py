"""The shares of failed scorings are counted where every group passes, and become metrics, an event and an alarm."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from offbeat.run.counted_learner import CountedLearner
from offbeat.run.health import Health
from offbeat.run.journal import MemoryJournal
from offbeat.run.scoring_counts import ScoringCounts
from offbeat.scoring.tally import count_outcomes
from offbeat.trainer.trainer import RefusedBatch, Trained
from offbeat.types import (
    BY_ANSWER,
    Completion,
    Group,
    Json,
    Prompt,
    PublishedDrift,
    Score,
    StepContext,
    Unscorable,
    VersionSpan,
)

SCORES: Sequence[Score | Unscorable] = (
    Score(1.0),
    Score(0.0, {"unscorable.timeout": 0.0}),
    Unscorable("crash", BY_ANSWER + "RecursionError"),
    Unscorable("sandbox", "starved"),
)


def group(version: int, scores: Sequence[Score | Unscorable]) -> Group:
    completions = [
        Completion(f"g/{n}", [4], [-0.1], (VersionSpan(version, 0, 1),), score=score) for n, score in enumerate(scores)
    ]
    return Group("g", Prompt("p", [3], "t"), tuple(completions))


class Steps:
    """A trainer that only counts."""

    def __init__(self, refuses: bool = False) -> None:
        self.step, self.refuses, self.calls = 0, refuses, list[str]()

    def check(self) -> None:
        self.calls.append("check")

    async def train(self, groups: Sequence[Group], context: StepContext) -> Trained | RefusedBatch:
        if self.refuses:
            return RefusedBatch({})
        self.step += 1
        return Trained(self.step, 1, (), (), (), PublishedDrift(), {}, {"unscorable_share": 0.0, "loss": 0.5}, {})

    async def publish(self, version: int) -> Mapping[str, Json]:
        return {"version": version}

    async def save(self, state: Mapping[str, Json]) -> None:
        self.calls.append(f"save {state}")

    async def finish(self) -> None:
        self.calls.append("finish")


def trained(learner: CountedLearner) -> Trained:
    outcome = asyncio.run(learner.train([], StepContext()))
    assert isinstance(outcome, Trained)
    return outcome


def test_outcomes_are_counted_by_version_blame_and_reason() -> None:
    counted = count_outcomes([group(7, SCORES), group(7, SCORES[:1]), replace(group(8, SCORES), id="other")])
    assert (7, "scored", 2) in counted and (8, "answer timeout", 1) in counted
    assert {(version, what) for version, what, _ in counted} == {
        (version, what) for version in (7, 8) for what in ("scored", "answer timeout", "answer crash", "grader sandbox")
    }


def test_a_step_reports_the_shares_since_the_step_before_and_their_causes() -> None:
    counts, journal, steps = ScoringCounts(), MemoryJournal(), Steps()
    learner = CountedLearner(steps, counts, journal)
    counts.add(count_outcomes([group(7, SCORES)]))
    first = trained(learner)
    assert first.metrics == {"unscorable_share": 0.25, "answer_fault_share": 0.5, "loss": 0.5}
    causes = {"answer crash": 1, "answer timeout": 1, "grader sandbox": 1, "scored": 1}
    assert journal.events == [{"step": 1, "kind": "unscorable", "versions": {"7": causes}}]
    counts.add(count_outcomes([group(8, [Score(1.0)])]))
    second = trained(learner)
    assert (second.metrics["unscorable_share"], second.metrics["answer_fault_share"]) == (0.0, 0.0)
    assert trained(learner).metrics == {"unscorable_share": 0.0, "loss": 0.5}  # nothing was generated
    assert len(journal.events) == 1 and learner.step == 3


def test_a_refused_batch_takes_no_counts_and_everything_else_passes_through() -> None:
    counts, steps = ScoringCounts(), Steps(refuses=True)
    learner = CountedLearner(steps, counts, MemoryJournal())
    counts.add(count_outcomes([group(7, SCORES)]))
    assert isinstance(asyncio.run(learner.train([], StepContext())), RefusedBatch)
    assert counts.metrics()["unscorable_share"] == 0.25
    learner.check()
    asyncio.run(learner.save({"a": 1}))
    asyncio.run(learner.finish())
    assert asyncio.run(learner.publish(3)) == {"version": 3}
    assert steps.calls == ["check", "save {'a': 1}", "finish"]


def test_an_alarm_names_the_groups_with_the_most_such_answers() -> None:
    worst = replace(group(7, [SCORES[1]] * 4), id="worst")
    health = Health()
    alarms = [health.check({"answer_fault_share": 0.5}, [group(7, SCORES), worst], {}) for _ in range(3)]
    assert [len(found) for found in alarms] == [0, 0, 1] and alarms[-1][0].groups[0] == "worst"
