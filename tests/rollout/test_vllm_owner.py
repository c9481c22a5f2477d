"""Processes of an engine end with their owner, whatever the shape of the tree and whenever it is killed."""

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from offbeat.rollout import vllm_owner
from offbeat.rollout.vllm_owner import OwnerTie, start_time
from tests.fixtures.engine_owner import LIMIT, SHAPES, kill_owner, session
from tests.fixtures.tiny_model import save_llama

TREE = """
import multiprocessing, os, signal, sys, time
from offbeat.rollout import vllm_owner

vllm_owner.ORPHAN_GRACE = 1.0
context = multiprocessing.get_context("spawn")
if __name__ != "__main__" and sys.argv[2] == "race":
    time.sleep(2)  # the owner dies before anything is unpickled

def worker():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(1, b"ready\\n")  # in one piece: two workers share the pipe
    time.sleep(600)

def core(workers):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as vLLM's core does during its start
    for _ in range(workers):
        context.Process(target=worker).start()
    if not workers:
        print("ready", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    workers, race = int(sys.argv[1]), sys.argv[2] == "race"
    with vllm_owner.tied_children():
        context.Process(target=core, args=(workers,)).start()
    if race:
        print("ready\\n" * max(1, workers), flush=True)
    time.sleep(600)
"""


def outlives(script: Path, workers: int, moment: str) -> list[int]:
    """Kill the owner of a tree of processes; return what is left of it after `LIMIT`."""
    with subprocess.Popen(
        [sys.executable, str(script), str(workers), moment],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as owner:
        assert owner.stdout is not None
        for _ in range(max(1, workers)):
            assert owner.stdout.readline() == "ready\n"
        assert len(session(owner.pid)) >= 1 + (workers if moment == "running" else 0)
        owner.kill()
    deadline = time.monotonic() + LIMIT
    while (left := session(owner.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


@pytest.mark.parametrize("workers", [0, 1, 2], ids=["uni", "mp", "two workers"])
@pytest.mark.parametrize("moment", ["running", "race"])
def test_a_tree_that_ignores_sigterm_ends_with_its_owner(tmp_path: Path, workers: int, moment: str) -> None:
    """In the race, the owner dies before its child has unpickled the tie."""
    script = tmp_path / "tree.py"
    script.write_text(TREE, encoding="utf-8")
    assert not outlives(script, workers, moment)


def test_a_worker_whose_threads_never_run_ends_with_its_core(tmp_path: Path) -> None:
    """A worker in an all-reduce can hold the interpreter; here it holds it for a minute, in C."""
    held = "ctypes.PyDLL(None).sleep(60)  # PyDLL keeps the interpreter locked"
    text = TREE.replace("    time.sleep(600)\n\ndef core", f"    {held}\n\ndef core")
    assert held in text
    script = tmp_path / "held.py"
    script.write_text("import ctypes\n" + text, encoding="utf-8")
    assert not outlives(script, 2, "running")


def test_the_owner_is_not_tied_to_itself() -> None:
    tie = OwnerTie(os.getpid(), start_time(os.getpid()))
    assert pickle.loads(pickle.dumps(tie)) == tie and not vllm_owner._watched


def test_a_pid_that_now_belongs_to_another_process_is_not_the_owner() -> None:
    code = "import os; from offbeat.rollout.vllm_owner import live_with; live_with(os.getppid(), 1)"
    child = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    assert child.returncode == -signal.SIGKILL


@pytest.mark.engine
@pytest.mark.parametrize(("shape", "moment"), [("uni", "generate"), ("mp2", "idle"), ("mp", "start")])
def test_the_real_engine_ends_with_its_owner(tmp_path: Path, shape: str, moment: str) -> None:
    save_llama(tmp_path, tied=True, heads=4)
    kill = kill_owner(tmp_path, shape, moment, delay=4.0 if moment == "start" else 0.1)
    size, _ = SHAPES[shape]
    assert kill.left == 0 and kill.processes >= (1 if shape == "uni" or moment == "start" else 1 + size)
