"""A version is published as a whole, readers find it, and they get every bit back."""

import os
import shutil
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from pyarrow import fs
from safetensors.torch import load_file
from torch import Tensor

from offbeat.errors import (
    AnotherPublisher,
    DamagedFile,
    DamagedState,
    VersionMissing,
    VersionTaken,
    WeightLogError,
    WrongBase,
)
from offbeat.storage.object_store import ObjectStore
from offbeat.storage.store import LocalStore, Store
from offbeat.weights.delta import Bits
from offbeat.weights.manifest import SUPERSEDED
from offbeat.weights.probe import Probe
from offbeat.weights.publisher import WeightLog
from offbeat.weights.subscriber import Subscription
from tests.fixtures.weights import is_state, make_state


@pytest.fixture(params=["local", "object"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return LocalStore(tmp_path / "log")
    return ObjectStore("s3://bucket/log", fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "bucket/log")


def publisher(store: Store, anchor_every: int = 20, keep: int = 20) -> WeightLog:
    return WeightLog(store, anchor_every=anchor_every, keep=keep)


def publish(log: WeightLog, *versions: int) -> None:
    for version in versions:
        log.publish(version, make_state(version).items())


def fetched(store: Store, version: int) -> dict[str, Tensor]:
    with Subscription(store, "reader") as reader:
        return {name: tensor.clone() for name, tensor in reader.fetch(version).items()}


def test_followers_and_late_joiners_get_every_version_exactly(store: Store) -> None:
    with publisher(store, anchor_every=3) as log, Subscription(store, "follower") as follower:
        assert follower.newest() is None
        kinds = []
        for version in range(0, 16, 2):
            kinds.append(log.publish(version, make_state(version).items()).kind)
            assert follower.newest() == version
            assert is_state(dict(follower.fetch(version)), version)
            assert is_state(fetched(store, version), version)
        assert kinds == ["anchor", "patch", "patch"] * 2 + ["anchor", "patch"]
        for version in (4, 14, 0, 6):  # back and forth, from any held state
            assert is_state(dict(follower.fetch(version)), version)
            assert is_state(dict(follower.fetch(version, from_anchor=True)), version)


def test_a_patch_is_small_and_a_follower_reads_no_anchor(tmp_path: Path) -> None:
    with WeightLog.open(tmp_path, anchor_every=2) as log, Subscription.open(tmp_path, name="follower") as follower:
        publish(log, 0)
        follower.fetch(0)
        patch = log.publish(1, make_state(1).items())
        assert patch.kind == "patch" and patch.changed == 173 and patch.patch_bytes < 4 * patch.changed
        assert log.publish(2, make_state(2).items()).kind == "anchor"
        for file in (tmp_path / "data").glob("0000000002-*.safetensors"):
            file.write_bytes(b"not looked at")
        assert is_state(dict(follower.fetch(2)), 2)  # a version with an anchor has a patch too


def test_an_anchor_is_a_plain_safetensors_file(tmp_path: Path) -> None:
    state = {
        "bf16": torch.randn(3, 5).bfloat16(),
        "f32": torch.randn(7),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 4),
        "flags": torch.tensor([True, False]),
        "name with ünïcode": torch.randn(2, dtype=torch.float64),
    }
    with WeightLog.open(tmp_path) as log:
        log.publish(0, state.items())
    [anchor] = (tmp_path / "data").iterdir()
    read = load_file(anchor)
    assert read.keys() == state.keys()
    for name, tensor in fetched(LocalStore(tmp_path), 0).items():
        assert tensor.dtype == state[name].dtype
        assert torch.equal(read[name], state[name]) and torch.equal(tensor, state[name])


def test_tensors_may_appear_disappear_and_change_shape_or_dtype(tmp_path: Path) -> None:
    states: list[dict[str, Tensor]] = [
        {"a": torch.ones(4), "b": torch.ones(2, 3)},
        {"a": torch.ones(4).bfloat16(), "c": torch.full((3,), -0.0)},
        {"c": torch.zeros(3), "b": torch.ones(3, 2), "a": torch.ones(4).half()},
        {},
        {"a": torch.ones(2, 2)},
    ]
    with WeightLog.open(tmp_path) as log, Subscription.open(tmp_path, name="follower") as follower:
        for version, state in enumerate(states):
            log.publish(version, state.items())
            for read in (follower.fetch(version), fetched(LocalStore(tmp_path), version)):
                assert list(read) == list(state)
                for name in state:
                    assert read[name].dtype == state[name].dtype and read[name].shape == state[name].shape
                    assert torch.equal(torch.signbit(read[name]), torch.signbit(state[name]))
                    assert torch.equal(read[name], state[name])
        assert log.versions() == (0, 1, 2, 3, 4)


def test_a_nan_keeps_its_payload(tmp_path: Path) -> None:
    before = torch.tensor([0x7FC0, 0x7F81, 0x0001], dtype=torch.int16).view(torch.bfloat16)
    after = torch.tensor([0x7FC0, 0x7FFF, 0x0002], dtype=torch.int16).view(torch.bfloat16)
    with WeightLog.open(tmp_path) as log:
        log.publish(0, [("w", before)])
        assert log.publish(1, [("w", after)]).changed == 2
    assert fetched(LocalStore(tmp_path), 1)["w"].view(torch.int16).tolist() == [0x7FC0, 0x7FFF, 0x0002]


def test_a_probe_is_stored_with_its_version_and_the_one_of_version_0_is_kept(store: Store) -> None:
    def probe(version: int) -> Probe:
        return Probe([[1, 2, 3]], [[-0.5, -float(version) - 0.1]])

    with publisher(store, anchor_every=2, keep=2) as log, Subscription(store, "reader") as reader:
        for version in range(6):
            log.publish(version, make_state(version).items(), probe(version))
        log.publish(6, make_state(6).items())
        assert 0 not in reader.versions() and reader.probe(6) is None
        for version in (0, 5):
            found = reader.probe(version)
            assert found is not None and np.array_equal(found.values, probe(version).values)
        with pytest.raises(VersionMissing, match="version 1 is not in"):
            reader.probe(1)


def test_the_next_publisher_starts_with_an_anchor(store: Store) -> None:
    with publisher(store) as log:
        publish(log, 0, 1)
    with publisher(store) as log:
        assert log.versions() == (0, 1)
        assert log.publish(2, make_state(2).items()).kind == "anchor"
        assert log.publish(3, make_state(3).items()).kind == "patch"
    assert all(is_state(fetched(store, version), version) for version in range(4))


def test_publishing_the_same_state_again_changes_nothing_and_another_state_is_refused(store: Store) -> None:
    with publisher(store) as log:
        publish(log, 0, 5, 10)
    with publisher(store) as log:
        assert log.publish(5, make_state(5).items()).kind == "repeated"
        with pytest.raises(VersionTaken, match=r"version 5 is in the log with another state .* rewind"):
            log.publish(5, make_state(6).items())
        with pytest.raises(VersionTaken, match="version 7 cannot be published after version 10"):
            log.publish(7, make_state(7).items())
        assert log.rewind(5) == [10]
        publish(log, 7, 10)
    assert all(is_state(fetched(store, version), version) for version in (0, 5, 7, 10))


def test_a_reader_of_a_rewound_version_gets_the_new_one(store: Store) -> None:
    with publisher(store) as log, Subscription(store, "reader") as reader:
        publish(log, 0, 1)
        reader.fetch(1)
        log.rewind(0)
        log.publish(1, make_state(99).items())
        log.publish(2, make_state(100).items())
        assert is_state(dict(reader.fetch(1)), 99) and is_state(dict(reader.fetch(2)), 100)


def test_a_failed_publish_leaves_no_trace_and_the_next_one_is_complete(store: Store) -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield "layer.0", make_state(50)["layer.0"]
        raise ConnectionError("a rank is gone")

    with publisher(store) as log:
        publish(log, 0, 1)
        with pytest.raises(ConnectionError):
            log.publish(2, broken())
        with Subscription(store, "reader") as reader:
            assert reader.newest() == 1 and is_state(dict(reader.fetch(1)), 1)
        assert len(store.list_names("data")) == 2
        assert log.publish(2, make_state(2).items()).kind == "anchor"
    assert is_state(fetched(store, 2), 2)


@pytest.mark.parametrize("names", [["w", "w"], ["a\nb"], ["a\0b"]])
def test_duplicate_and_invalid_tensor_names_are_refused(tmp_path: Path, names: list[str]) -> None:
    with WeightLog.open(tmp_path) as log, pytest.raises(WeightLogError, match="not a valid tensor name"):
        log.publish(0, [(name, torch.ones(1)) for name in names])


def test_only_one_publisher_at_a_time_on_a_local_path(tmp_path: Path) -> None:
    code = "import sys; from offbeat.weights.publisher import WeightLog; WeightLog.open(sys.argv[1])"
    with WeightLog.open(tmp_path):
        with pytest.raises(AnotherPublisher, match="this process"):
            WeightLog.open(tmp_path)
        other = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
        assert f"is being published to by process {os.getpid()} on " in other.stderr
    WeightLog.open(tmp_path).close()


def test_a_killed_publisher_and_its_surviving_children_do_not_block_the_next(tmp_path: Path) -> None:
    code = (
        "import os, sys, time; from offbeat.weights.publisher import WeightLog; log = WeightLog.open(sys.argv[1])\n"
        "if os.fork() == 0: time.sleep(20); os._exit(0)\n"
        "print('open', flush=True); os.kill(os.getpid(), 9)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "open\n"
        assert process.wait() == -9
        WeightLog.open(tmp_path).close()
        process.stdout.close()


def test_in_an_object_store_the_later_publisher_wins_and_the_earlier_one_gets_an_error(tmp_path: Path) -> None:
    store = ObjectStore("s3://b/log", fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "b/log")
    first = publisher(store)
    publish(first, 0)
    second = publisher(store)
    publish(second, 1)
    with pytest.raises(AnotherPublisher, match="started after this one; nothing was published"):
        publish(first, 2)
    assert sorted(store.list_names("versions")) == ["0000000000.json", "0000000001.json"]
    assert is_state(fetched(store, 1), 1)


def test_unsupported_uris_and_settings_are_refused_with_the_supported_ones() -> None:
    with pytest.raises(WeightLogError, match="local path or an object store"):
        WeightLog.open("hdfs://host/log")
    with pytest.raises(WeightLogError, match="anchor_every = 0"):
        WeightLog.open("log", anchor_every=0)


def test_files_left_by_a_dead_publisher_go_behind_the_next_checkpoint(tmp_path: Path) -> None:
    with WeightLog.open(tmp_path) as log:
        publish(log, 0)
    (tmp_path / "data" / "0000000001-dead.patch").write_bytes(b"half")
    (tmp_path / "versions" / ".0000000001.json.dead").write_bytes(b"half")
    with Subscription.open(tmp_path, name="reader") as reader:
        assert reader.versions() == (0,)
    with WeightLog.open(tmp_path) as log:
        assert len(list((tmp_path / "data").iterdir())) == 2, "its manifest may be lost, and restored from a copy"
        log.drop_superseded()
        assert [file.name[:10] for file in (tmp_path / "data").iterdir()] == ["0000000000"]
        assert len(list((tmp_path / "versions").iterdir())) == 1


def test_a_rewound_version_can_be_brought_back_until_it_is_dropped(store: Store) -> None:
    with publisher(store) as log:
        publish(log, 0, 1, 2, 3)
        assert log.rewind(1) == [3, 2] and log.versions() == (0, 1)
    aside = sorted(store.list_names(SUPERSEDED))
    assert [name.split("-")[1:] for name in aside] == [["rewound", "0000000003.json"], ["rewound", "0000000002.json"]]
    for name in aside:
        store.put(f"versions/{name.split('-')[2]}", store.read(f"{SUPERSEDED}/{name}"))
    assert is_state(fetched(store, 3), 3)
    with publisher(store) as log:
        log.rewind(1)
        log.publish(2, make_state(7).items())
        log.drop_superseded()
        assert store.list_names(SUPERSEDED) == [] and len(store.list_names("data")) == 3
    assert is_state(fetched(store, 2), 7) and is_state(fetched(store, 1), 1)


def test_nothing_is_dropped_while_a_manifest_cannot_be_read(store: Store) -> None:
    with publisher(store) as log:
        publish(log, 0, 1, 2)
        log.rewind(1)
        store.put("versions/0000000001.json", b"damaged")
        log.drop_superseded()
        assert len(store.list_names("data")) == 3 and len(store.list_names(SUPERSEDED)) == 1


def test_a_manifest_that_cannot_be_read_now_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with publisher(LocalStore(tmp_path)) as log:
        publish(log, 0, 1)

    def fail(self: LocalStore, name: str) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(LocalStore, "read", fail)
    with pytest.raises(WeightLogError, match=r"cannot be used: .*Input/output error"):
        publisher(LocalStore(tmp_path))
    monkeypatch.undo()
    with publisher(LocalStore(tmp_path)) as log:
        assert log.versions() == (0, 1)


def test_a_broken_chain_names_the_file_and_what_to_do(tmp_path: Path) -> None:
    with WeightLog.open(tmp_path) as log:
        publish(log, 0, 1, 2)
    [patch] = (tmp_path / "data").glob("0000000001-*.patch")
    content = patch.read_bytes()
    patch.write_bytes(content[:-1])
    with Subscription.open(tmp_path, name="reader") as reader:
        with pytest.raises(DamagedFile, match=f"the patch data/{patch.name} .* is damaged: its sha256.* anchor"):
            reader.fetch(2)
        assert is_state(dict(reader.fetch(0)), 0)
        patch.unlink()
        with pytest.raises(DamagedFile, match=f"the patch of version 1 .* is missing, .* Restore data/{patch.name}"):
            reader.fetch(2)
        (tmp_path / "versions" / "0000000001.json").rename(tmp_path / "aside")
        with pytest.raises(VersionMissing, match=r"version 2 cannot be loaded .* Fetch the newest"):
            reader.fetch(2)
        (tmp_path / "aside").rename(tmp_path / "versions" / "0000000001.json")
        patch.write_bytes(content)
        assert is_state(dict(reader.fetch(2)), 2)


def test_a_patch_is_not_applied_to_another_base(tmp_path: Path) -> None:
    with WeightLog.open(tmp_path / "a") as log, WeightLog.open(tmp_path / "b") as other:
        publish(log, 0, 1)
        other.publish(0, make_state(7).items())
    shutil.copytree(tmp_path / "b", tmp_path / "a", dirs_exist_ok=True)  # version 0 now comes from another log
    with (
        Subscription.open(tmp_path / "a", name="reader") as reader,
        pytest.raises(WrongBase, match="two logs were mixed"),
    ):
        reader.fetch(1)


def test_a_manifest_under_the_name_of_another_version_is_detected(tmp_path: Path) -> None:
    with WeightLog.open(tmp_path) as log:
        publish(log, 0, 1)
    shutil.copy(tmp_path / "versions/0000000000.json", tmp_path / "versions/0000000001.json")
    with Subscription.open(tmp_path, name="reader") as reader, pytest.raises(DamagedFile, match="describes version 0"):
        reader.fetch(1)


def test_writing_to_fetched_tensors_is_detected_and_the_next_fetch_is_right(tmp_path: Path) -> None:
    with WeightLog.open(tmp_path) as log, Subscription.open(tmp_path, name="reader") as reader:
        publish(log, 0, 1)
        reader.fetch(0)["layer.2"][5] = 1.0
        with pytest.raises(DamagedState, match=r"version 1: 1 tensors .*layer\.2"):
            reader.fetch(1)
        assert is_state(dict(reader.fetch(1)), 1)


def test_secrets_in_a_uri_do_not_appear_in_messages() -> None:
    store = ObjectStore.at("s3://key:secret@runs/exp?endpoint_override=127.0.0.1%3A9&scheme=http")
    assert store.uri == "s3://runs/exp"


def test_a_reader_may_open_and_close_before_the_log_exists(store: Store) -> None:
    with Subscription(store, "early") as reader:
        assert reader.newest() is None and reader.versions() == ()
    with Subscription(store, "early") as reader, pytest.raises(VersionMissing, match=r"which holds \[\]"):
        reader.fetch(3)


def test_a_fetch_from_an_anchor_frees_the_held_state_before_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with WeightLog.open(tmp_path) as log:
        publish(log, 0)
    with Subscription.open(tmp_path, name="reader") as reader, WeightLog.open(tmp_path) as log:
        assert reader.fetch(0) and reader._held is not None
        words = weakref.ref(reader._held.tensors["layer.0"].words)
        publish(log, 1)  # a new publisher: an anchor without a patch
        alive: list[bool] = []
        make = Bits.empty
        monkeypatch.setattr(Bits, "empty", lambda *what: alive.append(words() is not None) or make(*what))
        assert is_state(dict(reader.fetch(1)), 1)
        assert alive == [False] * 4
