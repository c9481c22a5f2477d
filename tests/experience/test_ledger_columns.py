"""The log keeps drift, effective sample size and updates of every trained event, also in a log of an earlier one."""

import shutil
from pathlib import Path

import lance
import pyarrow as pa

from offbeat.experience.ledger import Fate, LedgerEvent
from offbeat.experience.ledger import LedgerEventKind as Kind
from offbeat.experience.log import ExperienceLog
from offbeat.experience.schema import EVENTS
from tests.fixtures.groups import make_group


def test_every_trained_event_keeps_its_drift_and_effective_sample_size(tmp_path: Path) -> None:
    with ExperienceLog.open(tmp_path) as log:
        log.append([make_group(0), make_group(1)])
        log.record(
            [
                LedgerEvent("g0", Kind.TRAINED, 1, drift=0.02, ess=0.9),
                LedgerEvent("g1", Kind.TRAINED, 1),
                LedgerEvent("g0", Kind.TRAINED, 5, drift=0.3, ess=0.4),
            ]
        )
        fates = log.ledger().fates
    assert fates["g0"].drift == (0.02, 0.3) and fates["g0"].steps == (1, 5)
    assert fates["g0"].fate is Fate.TRAINED, "a group that is retired by its drift stays trained"
    assert fates["g1"].drift == (None,)
    stored = lance.dataset(str(tmp_path / "events.lance")).to_table(columns=["drift", "ess"]).to_pylist()
    assert stored[2] == {"drift": 0.3, "ess": 0.4} and stored[1] == {"drift": None, "ess": None}


def test_a_log_of_an_earlier_version_gets_the_columns_when_it_is_opened(tmp_path: Path) -> None:
    later = ("drift", "ess", "updates", "run")
    older = pa.schema([field for field in EVENTS if field.name not in later])
    row = {"group_id": "g0", "event": "trained", "step": 1, "cause": "", "by": "trainer", "at": 0.0}
    table = pa.Table.from_pylist([row], schema=older)
    with ExperienceLog.open(tmp_path):
        shutil.rmtree(tmp_path / "events.lance")
    lance.write_dataset(table, str(tmp_path / "events.lance"), enable_stable_row_ids=True)
    with ExperienceLog.open(tmp_path) as log:
        log.append([make_group(0)])
        log.record([LedgerEvent("g0", Kind.TRAINED, 2, drift=0.1, ess=0.8, updates=3)])
        found = log.ledger().fates["g0"]
        assert found.drift == (None, 0.1) and found.updates == (None, 3)
