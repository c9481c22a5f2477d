"""The private names of other libraries that offbeat uses, each in one module, exist and do what it needs.

A new version of a library that renames one fails here, and not in a run.
"""

import inspect
import re
from pathlib import Path

import lance
import pyarrow as pa
import pytest

SRC = Path(__file__).parent.parent / "src" / "offbeat"
USED = {
    "_take_rows": "experience/lance_table.py",
    "_adapter_manager": "rollout/vllm_worker.py",
    "ray._private": "run/ray/attempt.py",
}


@pytest.mark.parametrize("name", USED)
def test_a_private_name_is_used_in_one_module(name: str) -> None:
    found = {
        str(file.relative_to(SRC))
        for file in SRC.rglob("*.py")
        if re.search(rf"\b{re.escape(name)}\b", file.read_text())
    }
    assert found == {USED[name]}


def test_lance_takes_rows_by_their_ids(tmp_path: Path) -> None:
    dataset = lance.write_dataset(pa.table({"n": [3, 1, 4]}), str(tmp_path / "n.lance"), enable_stable_row_ids=True)
    ids = dataset.to_table(with_row_id=True)["_rowid"].to_pylist()
    assert dataset._take_rows([ids[2], ids[0]], columns=["n"])["n"].to_pylist() == [4, 3]


def test_ray_finds_the_address_of_a_running_cluster() -> None:
    services = pytest.importorskip("ray._private.services")
    assert callable(services.canonicalize_bootstrap_address_or_die)


@pytest.mark.engine
@pytest.mark.filterwarnings("default")
def test_vllms_adapters_are_added_and_removed_by_number() -> None:
    from vllm.lora import model_manager, worker_manager

    assert "self._adapter_manager" in inspect.getsource(worker_manager.WorkerLoRAManager)
    manager = model_manager.LoRAModelManager
    assert all(callable(getattr(manager, name)) for name in ("add_adapter", "remove_adapter", "activate_adapter"))
