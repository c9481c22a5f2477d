"""A run with hostile text in every place that can hold text."""

import json
from pathlib import Path

from offbeat.events import EventKind
from offbeat.experience.ledger import LedgerEvent, LedgerEventKind
from offbeat.experience.log import ExperienceLog
from offbeat.run.directory import RunDirectory
from offbeat.run.journal import FileJournal
from offbeat.types import Completion, Group, Prompt, Score, Unscorable, VersionSpan
from tests.fixtures.hostile_text import TEXTS, encodable
from tests.reports.made_run import make_run


def save_tokenizer(directory: Path) -> None:
    """Save a tokenizer in which token i decodes to text i, escaped if a tokenizer file cannot contain it."""
    words = {text: i for i, text in enumerate(encodable(text) for text in TEXTS)}
    file = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": None, "post_processor": None, "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": encodable(TEXTS[0])},
    }  # fmt: skip
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(file), encoding="utf-8")


def make_hostile_run(place: Path) -> RunDirectory:
    """Put hostile text into answers, prompt, columns, ids, events and environment."""

    def also(journal: FileJournal) -> None:
        journal.write(EventKind.ALARM, 8, action="warn", says=encodable(" ".join(TEXTS[:7])), groups=[TEXTS[0]] * 9)
        journal.write(EventKind.WORKER_LOST, 8, worker=TEXTS[1], why=encodable("x" * 1_000_000))

    directory = make_run(place, also=also)
    save_tokenizer(directory.tokenizer)
    environment = {"began": TEXTS[0], "platform": TEXTS[2], "versions": {TEXTS[1]: TEXTS[5]}}
    (directory.path / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    name = TEXTS[0] + TEXTS[4]
    answers = tuple(
        Completion(f"{name}/{i}", [i], [-1.0], (VersionSpan(6, 0, 1),), score=Score(float(i % 2)))
        for i in reversed(range(len(TEXTS)))
    )
    failed = Completion(
        f"{name}/x", [0], [-1.0], (VersionSpan(6, 0, 1),), score=Unscorable("crash", TEXTS[1] + TEXTS[4])
    )
    columns = {TEXTS[2]: TEXTS[1], "answer": TEXTS[5]}
    group = Group(name, Prompt("p", [0, 4, 5, 7], TEXTS[0], columns), (failed, *answers))
    with ExperienceLog.open(directory.experience) as log:
        log.append([group])
        log.record([LedgerEvent(name, LedgerEventKind.EXPIRED, step=8, cause=TEXTS[1])])
    return directory
