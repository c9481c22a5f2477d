"""Try every port of a run from a second network namespace: which ones can another machine reach?

    python -m lab.attacks.run_ports    minutes; needs root, for the namespace; writes rows run.7.ray and run.7.local

A veth pair connects the namespace to this machine. The command tries all 65,535 TCP ports from there: once while
nothing runs, and once while a run makes steps. A port that answers only during the run belongs to the run. The runs are
one on Ray with vLLM workers and two ranks, and a local one. The command also reads from the kernel on which sockets the
processes of the run listen, and asks Ray for its state on loopback, without the token.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lab.figures import Figure, command_parser, record
from tests.fixtures.runs import Broken, Run, count_steps, descendants, scratch, write_config
from tests.fixtures.tiny_model import save_llama

NAMESPACE, HERE, THERE = "offbeat-neighbor", "10.231.7.1", "10.231.7.2"

SCAN = """
import errno, json, selectors, socket, sys
host, found = sys.argv[1], []
def finish(selector, timeout):
    for key, _ in selector.select(timeout):
        if key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
            found.append(key.data)
        selector.unregister(key.fileobj)
        key.fileobj.close()
selector = selectors.DefaultSelector()
for port in range(1, 65536):
    one = socket.socket()
    one.setblocking(False)
    if one.connect_ex((host, port)) == errno.ECONNREFUSED:
        one.close()
    else:
        selector.register(one, selectors.EVENT_WRITE, port)
    while len(selector.get_map()) > 200:
        finish(selector, 1)
while selector.get_map():
    finish(selector, 2)
print(json.dumps(sorted(found)))
"""


@contextmanager
def neighbor() -> Iterator[None]:
    """Make a second network namespace that is connected to this one."""
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
    """Return the ports of this machine that accept a connection from the other namespace."""
    command = ["ip", "netns", "exec", NAMESPACE, sys.executable, "-c", SCAN, HERE]
    return set(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


def listening(root: int) -> list[str]:
    """Return the TCP and UDP addresses on which `root` and the processes below it listen."""
    pids = {root, *(pid for pid, _ in descendants(root))}
    lines = subprocess.run(["ss", "-Hlntup"], capture_output=True, text=True, check=True).stdout.splitlines()
    found = []
    for line in lines:
        if any(f"pid={pid}," in line for pid in pids):
            found.append(line.split()[4])
    return sorted(set(found))


def inspect_run(what: str, model: Path) -> tuple[set[int], list[str], bool]:
    """Return the ports that open with the run, its sockets, and True if Ray refuses a client without a token."""
    before = answering()
    with scratch() as directory:
        run = Run(directory / "run")
        on_ray = what == "ray"
        write_config(directory, model, engine="vllm", ranks=2 if on_ray else 1, on_ray=on_ray)
        run.start("train", str(directory / "run.toml"), "--out", str(run.directory))
        run.wait_for("three steps", lambda events: count_steps(events) >= 3, 300)
        assert run.driver is not None
        sockets = listening(run.driver.pid)
        during = answering()
        refused = not on_ray or _refused((run.directory / "ray.address").read_text().strip())
        run.finish()
    return during - before, sockets, refused


def _refused(address: str) -> bool:
    from offbeat.run.ray.attempt import query_without_token

    asked = query_without_token(address)
    if asked.returncode and "nauthenticated" not in asked.stderr:
        raise Broken(f"without a token, Ray failed for another reason than the token: {asked.stderr[-500:]}")
    return asked.returncode != 0


def main() -> bool:
    command_parser(__doc__).parse_args()
    figures = []
    with scratch() as directory, neighbor():
        model = directory / "model"
        save_llama(model, tied=False)
        for what in ("ray", "local"):
            opened, sockets, refused = inspect_run(what, model)
            beyond = [one for one in sockets if not one.startswith(("127.", "[::ffff:127.", "[::1]"))]
            if what == "ray" and not sockets:
                raise Broken("found no socket of a run on Ray: the inspection is broken")
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
