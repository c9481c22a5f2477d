"""Which ports of a running run a neighbour can reach: everything is tried from a second network namespace.

    python -m lab.attacks.run_ports          rows run.7.*; needs root, for the namespace

A namespace is joined to this machine by a cable (veth). While nothing runs, and again while a run on Ray with vLLM
workers and two ranks, or a local run, makes steps, all 65,535 TCP ports of this machine are tried from there, and the
sockets that the run's processes listen on are read from the kernel. A port that answers only while the run runs is the
run's. Beside it, on loopback itself, Ray is asked for its state without the token.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lab.figures import Figure, record
from lab.fixtures.tiny_model import save_llama
from lab.torture.run import Broken, Run, descendants, place, write_config

NAMESPACE, HERE, THERE = "offbeat-neighbour", "10.231.7.1", "10.231.7.2"

SCAN = """
import errno, json, selectors, socket, sys
host, found = sys.argv[1], []
def finish(chooser, patience):
    for key, _ in chooser.select(patience):
        if key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
            found.append(key.data)
        chooser.unregister(key.fileobj)
        key.fileobj.close()
chooser = selectors.DefaultSelector()
for port in range(1, 65536):
    one = socket.socket()
    one.setblocking(False)
    said = one.connect_ex((host, port))
    if said == errno.ECONNREFUSED:
        one.close()
    else:
        chooser.register(one, selectors.EVENT_WRITE, port)
    while len(chooser.get_map()) > 200:
        finish(chooser, 1)
while chooser.get_map():
    finish(chooser, 2)
print(json.dumps(sorted(found)))
"""


@contextmanager
def neighbour() -> Iterator[None]:
    """A second network namespace with a cable to this one."""
    steps = [
        f"ip netns add {NAMESPACE}",
        f"ip link add offbeat-near type veth peer name offbeat-far netns {NAMESPACE}",
        f"ip address add {HERE}/24 dev offbeat-near",
        "ip link set offbeat-near up",
        f"ip -n {NAMESPACE} address add {THERE}/24 dev offbeat-far",
        f"ip -n {NAMESPACE} link set offbeat-far up",
    ]
    subprocess.run(f"ip netns delete {NAMESPACE}", shell=True, capture_output=True)
    for step in steps:
        subprocess.run(step, shell=True, check=True)
    try:
        yield
    finally:
        subprocess.run(f"ip netns delete {NAMESPACE}", shell=True, check=True)


def answering() -> set[int]:
    """Ports of this machine that take a connection from the neighbour."""
    command = ["ip", "netns", "exec", NAMESPACE, sys.executable, "-c", SCAN, HERE]
    return set(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


def listening(root: int) -> list[str]:
    """Addresses that processes below `root`, and it, listen on: TCP and UDP."""
    ours = {root, *(pid for pid, _ in descendants(root))}
    lines = subprocess.run(["ss", "-Hlntup"], capture_output=True, text=True, check=True).stdout.splitlines()
    found = []
    for line in lines:
        if any(f"pid={pid}," in line for pid in ours):
            found.append(line.split()[4])
    return sorted(set(found))


def looked_at(what: str, model: Path) -> tuple[set[int], list[str], bool]:
    """Ports open to the neighbour only while the run runs, sockets it listens on, whether Ray refuses strangers."""
    before = answering()
    with place() as directory:
        run = Run(directory / "run")
        on_ray = what == "ray"
        write_config(directory, model, engine="vllm", ranks=2 if on_ray else 1, on_ray=on_ray)
        run.start("train", str(directory / "run.toml"), "--out", str(run.directory))
        run.wait_for("steps", lambda events: sum(e["kind"] == "step" for e in events) >= 3, 300)
        assert run.driver is not None
        sockets = listening(run.driver.pid)
        during = answering()
        refused = not on_ray or _refused((run.directory / "ray.address").read_text().strip())
        run.finish()
    return during - before, sockets, refused


def _refused(address: str) -> bool:
    from offbeat.run.ray.session import asked_without_token

    asked = asked_without_token(address)
    if asked.returncode and "nauthenticated" not in asked.stderr:
        raise Broken(f"asked without a token, Ray said something else than no: {asked.stderr[-500:]}")
    return asked.returncode != 0


def main() -> bool:
    figures = []
    with place() as directory, neighbour():
        model = directory / "model"
        save_llama(model, tied=False)
        for what in ("ray", "local"):
            opened, sockets, refused = looked_at(what, model)
            beyond = [one for one in sockets if not one.startswith(("127.", "[::ffff:127.", "[::1]"))]
            if what == "ray" and not sockets:
                raise Broken("a run on Ray listens nowhere: the look was wrong")
            figures.append(
                Figure(
                    f"run.7.{what}",
                    f"TCP ports of a {what} run with vLLM that take a connection from a second network namespace",
                    "0",
                    len(opened),
                    "ports",
                    not opened and refused,
                    65_535,
                    f"{len(sockets)} sockets, {len(beyond)} of them beyond loopback {beyond[:4]}; on loopback, without "
                    f"the token: {'refused' if refused else 'ANSWERED'}" if what == "ray" else
                    f"{len(sockets)} sockets, {len(beyond)} of them beyond loopback {beyond[:4]}",
                )
            )  # fmt: skip
    return record(*figures)


if __name__ == "__main__":
    sys.exit(not main())
