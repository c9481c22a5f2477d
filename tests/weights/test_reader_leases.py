"""Retention keeps the versions that are still needed: by readers with leases, and by checkpoints with pins."""

import os
import time
from pathlib import Path

import pytest
from pyarrow import fs

from offbeat.errors import VersionMissing
from offbeat.storage.object_store import ObjectStore
from offbeat.storage.store import LocalStore, Store
from offbeat.weights import retention as leases
from offbeat.weights.publisher import WeightLog
from offbeat.weights.subscriber import Subscription
from tests.fixtures.weights import is_state, make_state


def publish(log: WeightLog, *versions: int) -> None:
    for version in versions:
        log.publish(version, make_state(version).items())


def loadable(store: Store, version: int) -> bool:
    with Subscription(store, "examiner") as reader:
        return is_state(dict(reader.fetch(version)), version)


@pytest.mark.parametrize("kind", ["local", "object"])
def test_retention_keeps_newest_pinned_and_leased_versions(kind: str, tmp_path: Path) -> None:
    store: Store = LocalStore(tmp_path)
    if kind == "object":
        store = ObjectStore("s3://b/log", fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "b/log")
    with WeightLog(store, anchor_every=3, keep=2) as log, Subscription(store, "slow") as slow:
        publish(log, 0, 1, 2)
        slow.fetch(2)
        publish(log, 3, 4, 5)
        log.pin(4, "checkpoint 4")
        publish(log, *range(6, 12))
        assert log.versions() == (0, 1, 2, 3, 4, 9, 10, 11)
        assert is_state(dict(slow.fetch(2, from_anchor=True)), 2)
        assert all(loadable(store, version) for version in log.versions())
        log.unpin(4, "checkpoint 4")
        slow.fetch(11)
        publish(log, 12)
        assert log.versions() == (9, 10, 11, 12)
        assert len(store.list_names("data")) == 6
        with pytest.raises(VersionMissing, match="cannot be pinned"):
            log.pin(4, "too late")


def test_a_dead_readers_lease_expires_and_an_unreadable_lease_keeps_everything(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with WeightLog.open(tmp_path, anchor_every=1, keep=1) as log:
        publish(log, 0)
        reader = Subscription.open(tmp_path, name="a/b c")
        reader.fetch(0)
        publish(log, 1)
        assert log.versions() == (0, 1)
        [lease] = (tmp_path / "readers").iterdir()
        content = lease.read_bytes()
        lease.write_bytes(b"?")
        publish(log, 2)
        assert log.versions() == (0, 1, 2)
        lease.write_bytes(content)
        long_ago = time.time() - leases.LEASE_SECONDS - 5
        os.utime(lease, (long_ago, long_ago))
        publish(log, 3)
        assert log.versions() == (3,)
        assert leases.leased(store, time.time() + 20 * leases.LEASE_SECONDS, []) == set()
        assert not list((tmp_path / "readers").iterdir())


def test_a_lease_is_renewed_while_its_reader_polls(tmp_path: Path) -> None:
    now = 1000.0
    lease = leases.ReaderLease(LocalStore(tmp_path), "reader", lambda: now)
    lease.renew()
    assert not (tmp_path / "readers").exists()
    lease.hold({3})
    [file] = (tmp_path / "readers").iterdir()
    for later, expected in ((leases.LEASE_SECONDS / 5, False), (leases.LEASE_SECONDS / 3, True)):
        os.utime(file, (0, 0))
        now = 1000.0 + later
        lease.renew()
        assert (file.stat().st_mtime > 0) == expected
    lease.release()
    assert not list((tmp_path / "readers").iterdir())
