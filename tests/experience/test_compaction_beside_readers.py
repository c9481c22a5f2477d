"""Compaction changes a handle in place, and Lance panics if two threads share one."""

import threading
from pathlib import Path

from offbeat.experience.ledger import LedgerEvent, LedgerEventKind
from offbeat.experience.log import ExperienceLog


def test_a_table_is_compacted_while_threads_read_it(tmp_path: Path) -> None:
    with ExperienceLog.open(tmp_path) as log:
        ended, table = threading.Event(), log.tables.events
        seen: list[int] = []

        def read() -> None:
            while not ended.is_set():
                seen.append(len(table.scan(0, table.rows(), ["group_id"])))

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        try:
            for _ in range(4):
                for number in range(8):
                    log.record([LedgerEvent(f"g{number}", LedgerEventKind.STARTED)])
                assert table.compact(1_024) > 0
        finally:
            ended.set()
            for reader in readers:
                reader.join()
        assert table.rows() == 32
        assert seen and max(seen) <= 32
