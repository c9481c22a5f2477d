"""A concurrent run that trains an adapter and generates with the real vLLM: versions change without a pause."""

from pathlib import Path

import pytest

from offbeat.events import EventKind
from offbeat.experience.log import ExperienceLog
from tests.fixtures.tiny_model import save_llama
from tests.run.test_local import config, ran

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]  # vLLM's own imports emit warnings


def test_new_versions_generate_without_a_pause_and_each_completion_has_one(tmp_path: Path) -> None:
    save_llama(tmp_path / "model", tied=True)
    asked = config(
        tmp_path / "model",
        adapter={"rank": 4},
        engine={"kind": "vllm"},
        optimizer={"learning_rate": 1e-2},
        run={"mode": "concurrent", "max_lag": 2},
        objective={"preset": "rec-oneside-nois", "zero_variance_mask": False},
    )
    events, directory = ran(asked, tmp_path / "run")
    assert sum(event["kind"] == EventKind.STEP for event in events) == 6
    assert not any("failed its probe" in str(event) for event in events)
    with ExperienceLog.open(directory.experience, own_run=directory.own_run(asked)) as log:
        completions = [one for group in log.groups() for one in group.completions]
        log.ledger().check()
    assert len(completions) >= 6 * 16 and all(len(one.versions) == 1 for one in completions)
    assert len({one.versions[0].version for one in completions}) > 1, "later versions generated, too"
