"""A run on Ray with real parts and a tiny model: the same bits as in one process, and what is refused."""

import subprocess
import sys
from pathlib import Path
from tempfile import gettempdir

import pytest

from lab.torture.run import schedule
from offbeat.config import Config
from offbeat.errors import RunError
from offbeat.events import EventKind
from offbeat.run.directory import RunDirectory
from offbeat.run.journal import read
from offbeat.run.ray.entry import environment, join_command
from tests.run.test_local import config, model, parameters

pytestmark = pytest.mark.engine
__all__ = ["model"]

DRIVE = """
import sys
from pathlib import Path
from offbeat.run.directory import RunDirectory
directory = RunDirectory(Path(sys.argv[1]))
config = directory.config()
if config.run.place == "ray":
    from offbeat.run.ray.entry import train
else:
    from offbeat.run.local import train
print(train(config, directory))
"""


def kinds(directory: RunDirectory) -> list[object]:
    """Return the kinds of events in their order, without those that come whenever a start has got so far."""
    found = [event["kind"] for event in read(directory.events)]
    assert EventKind.ESTIMATED in found
    return [kind for kind in found if kind not in (EventKind.WORKER_READY, EventKind.ESTIMATED)]


def ran(asked: Config, place: Path) -> RunDirectory:
    """Train in a process of its own, because Ray reads its settings once, at import."""
    directory = RunDirectory(place)
    directory.create(asked)
    done = subprocess.run([sys.executable, "-c", DRIVE, str(place)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "0 in flight" in done.stdout
    return directory


def test_a_lockstep_run_on_ray_computes_the_same_bits_as_in_one_process(model: Path, tmp_path: Path) -> None:
    here, there = (
        config(model, steps=5, run={"place": place}, sync={"every": 2}, evaluation={"every": 5, "prompts": 4})
        for place in ("local", "ray")
    )
    local, cluster = ran(here, tmp_path / "local"), ran(there, tmp_path / "ray")
    theirs = parameters(cluster, there)
    for name, tensor in parameters(local, here).items():
        assert tensor.equal(theirs[name]), name
    assert kinds(local) == kinds(cluster)
    assert not (cluster.path / "ray.address").exists()
    assert (cluster.path / "ray.token").stat().st_mode & 0o077 == 0
    assert list(cluster.ray.glob("session_*/logs/*")), "Ray's files are in the run directory"
    assert not list(cluster.ray.rglob("sockets")) and not list(Path(gettempdir()).glob(f"ob-{cluster.name}"))


@pytest.mark.parametrize("rank", [0, 4])
def test_two_ranks_learn_the_same_as_one(model: Path, tmp_path: Path, rank: int) -> None:
    changes = {"steps": 3, "evaluation": {"every": 3, "prompts": 4}, "adapter": {"rank": rank}}
    one = config(model, **changes)
    two = config(model, **changes, run={"place": "ray"}, trainer={"save_every": 2, "ranks": 2})
    alone, together = ran(one, tmp_path / "one"), ran(two, tmp_path / "two")
    theirs = parameters(together, two)
    for name, tensor in parameters(alone, one).items():
        assert (tensor - theirs[name]).abs().max() < 1e-4, name
    assert kinds(alone) == kinds(together)


@pytest.mark.parametrize("seed", [12])
def test_a_killed_rank_costs_only_the_steps_since_the_checkpoint(seed: int, model: Path) -> None:
    outcome = schedule(seed, model)
    assert (outcome.target, outcome.signal) == ("rank", "SIGKILL")
    assert outcome.noticed < 5


def test_an_existing_cluster_is_used_only_with_a_token(model: Path, tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    asked = config(model, run={"place": "ray"}, cluster={"address": "10.0.0.1:6379"})
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(RunError, match="RAY_AUTH_MODE=token"), environment(asked, RunDirectory(tmp_path)):
        pass


def test_the_join_command_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory(tmp_path)
    with pytest.raises(RunError, match="does not run on Ray"):
        join_command(directory, 1)
    directory.cluster.write_text("127.0.0.1:6379\n")
    with pytest.raises(RunError, match="loopback only"):
        join_command(directory, 1)
    directory.cluster.write_text("10.0.0.1:6379\n")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert join_command(directory, 2)[-2:] == ['--resources={"offbeat_worker": 2}', "--block"]
