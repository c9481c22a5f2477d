"""The shares of failed scorings are counted where every group passes, and become metrics, an event and an alarm."""

from collections.abc import Sequence
from dataclasses import replace

from offbeat.run.desk import ScoringCounts
from offbeat.run.health import Health
from offbeat.run.journal import MemoryJournal
from offbeat.scoring.tally import count_outcomes
from offbeat.trainer.trainer import Trained
from offbeat.types import (
    BY_ANSWER,
    Completion,
    Group,
    Prompt,
    PublishedDrift,
    Score,
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


STEP = Trained(1, 1, (), (), (), PublishedDrift(), {}, {"unscorable_share": 0.0, "loss": 0.5}, {})


def test_outcomes_are_counted_by_version_blame_and_reason() -> None:
    counted = count_outcomes([group(7, SCORES), group(7, SCORES[:1]), replace(group(8, SCORES), id="other")])
    assert (7, "scored", 2) in counted and (8, "answer timeout", 1) in counted
    assert {(version, what) for version, what, _ in counted} == {
        (version, what) for version in (7, 8) for what in ("scored", "answer timeout", "answer crash", "grader sandbox")
    }


def test_a_step_reports_the_shares_since_the_step_before_and_their_causes() -> None:
    counts, journal = ScoringCounts(), MemoryJournal()
    counts.add(count_outcomes([group(7, SCORES)]))
    first = counts.report(STEP, journal)
    assert first.metrics == {
        "unscorable_share": 0.25,
        "answer_fault_share": 0.5,
        "right_unscorable_share": 0.0,
        "loss": 0.5,
    }
    causes = {"answer crash": 1, "answer timeout": 1, "grader sandbox": 1, "scored": 1}
    assert journal.events == [{"step": 1, "kind": "unscorable", "versions": {"7": causes}}]
    counts.add(count_outcomes([group(8, [Score(1.0)])]))
    second = counts.report(STEP, journal)
    assert (second.metrics["unscorable_share"], second.metrics["answer_fault_share"]) == (0.0, 0.0)
    assert counts.report(STEP, journal).metrics == {"unscorable_share": 0.0, "loss": 0.5}  # nothing was generated
    assert len(journal.events) == 1


def test_an_alarm_names_the_groups_with_the_most_such_answers() -> None:
    worst = replace(group(7, [SCORES[1]] * 4), id="worst")
    health = Health()
    alarms = [health.check({"answer_fault_share": 0.5}, [group(7, SCORES), worst], {}) for _ in range(3)]
    assert [len(found) for found in alarms] == [0, 0, 1] and alarms[-1][0].groups[0] == "worst"
