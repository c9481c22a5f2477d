"""Follow a completion, a policy version and a user's reward function through real calls, and list the files they pass.

    python -m lab.house.walk            this tree and an earlier commit; writes rows rooms.2.*
    python -m lab.house.walk --short    this tree only; records nothing

Every call of a function of offbeat is watched while a small run trains two steps with the transformers engine. A file
counts for a route if one of its functions takes or returns the thing that travels or a container that holds it, or is
called directly by a function that does (for a reward function, which has no parts, the first alone):

    completion   from the engine's answer to the gradient: Completion, Group, and the batches made of them
    version      from the optimizer to the probe: the published state, its patches, manifests and probe
    reward       a reward function in a user's file, from the configuration to a score, scoring process included

About a minute.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from lab.figures import ROOT, Figure, command_parser, record
from lab.house.earlier import BEFORE, earlier_checkout
from tests.fixtures.tiny_model import save_model

GOALS = {"completion": 26, "version": 14, "reward": 8}
WATCH = '''
"""Watch calls of offbeat's functions; append (route, file) to a file as soon as it is known."""
import os, sys, threading

CARRIERS = {
    "completion": {"Completion", "Group", "Batch", "MicroBatch", "Part", "MicroBatchStreams", "Layout", "ModelInputs",
                   "Seen", "Pass", "MicroBatchPass", "MicroBatchTensors", "ForwardPass", "TokenStats",
                   "Streams", "Loss", "Plan", "MicroBatchPlan",
                   "Credit", "Draw"},
    "version": {"Published", "Bits", "TensorEntry", "Manifest", "VersionManifest", "Probe", "Verdict", "ProbeVerdict",
                "Route", "File", "Parameter"},
    "reward": {"Reward", "Recipe"},
}
SEEN, HOLDERS = set(), {}
BEGINS = {"completion": "generate", "version": "publish"}  # before that, the run estimates its memory
BEGUN = {"reward"}
PASSED_OVER = ("<module>", "<lambda>", "__eq__", "__repr__")
OUT = os.open(os.environ["OFFBEAT_WALK"], os.O_APPEND | os.O_CREAT | os.O_WRONLY)


def names_the_reward(value):
    while hasattr(value, "func"):
        value = value.func
    if isinstance(value, str):
        return ":travelling_reward" in value
    return getattr(value, "__name__", "") == "travelling_reward"


def routes_of(value, depth=2):
    found = set()
    name = type(value).__name__
    for route, carriers in CARRIERS.items():
        if name in carriers:
            found.add(route)
    if names_the_reward(value):
        found.add("reward")
    if depth and isinstance(value, (list, tuple)) and len(value):
        for one in list(value)[:3]:
            found |= routes_of(one, depth - 1)
    elif depth and isinstance(value, dict) and value:
        for one in list(value.values())[:8]:
            found |= routes_of(one, depth - 1)
    return found


def watch(frame, event, argument):
    if event not in ("call", "return"):
        return
    code = frame.f_code
    if "/offbeat/" not in code.co_filename or code.co_name in PASSED_OVER:
        return
    if event == "call":
        count = code.co_argcount + code.co_kwonlyargcount
        values = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
        if values and code.co_varnames[0] in ("self", "cls"):
            # A method of the thing that travels counts; what other objects hold in their fields does not.
            values[0] = values[0] if type(values[0]).__name__ in set().union(*CARRIERS.values()) else None
    else:  # whoever makes a task passes its reward function on; whoever takes one may only want its prompts
        values = [*argument.rewards] if isinstance(getattr(argument, "rewards", None), tuple) else [argument]
    file = code.co_filename.partition("/offbeat/")[2]
    BEGUN.update(route for route, name in BEGINS.items() if code.co_name == name)
    if event == "return" and code.co_name == "update" and file.endswith("optimizer.py"):
        BEGUN.discard("completion")  # the gradient is applied; the next answers begin the route again
    holds = set().union(*map(routes_of, values)) if values else set()
    HOLDERS.setdefault(code, set()).update(holds)
    caller = frame.f_back
    if event == "call" and caller is not None:
        holds = holds | HOLDERS.get(caller.f_code, set()) - {"reward"}  # what a holder calls works on a part of it
    if holds:
        for route in holds & BEGUN:
            if (route, file) not in SEEN:
                SEEN.add((route, file))
                os.write(OUT, f"{route} {file}\\n".encode())


sys.setprofile(watch)
threading.setprofile(watch)
'''

TASK = """
from offbeat.tasks.rewards import Reward
from offbeat.tasks.task import Example, Task


def travelling_reward(text, columns):
    return float(sum(character.isdigit() for character in text) >= 2)


task = Task("digits", [Example(str(n), f"{n}+1=", {}) for n in range(64)], (Reward(travelling_reward),))
"""

RUN = """
import sys
from pathlib import Path
from offbeat.config import parse
from offbeat.run.directory import RunDirectory
from offbeat.run.local import train
model, task, place = sys.argv[1:]
config = parse({
    "steps": 2, "prompts_per_step": 4, "group_size": 4,
    "model": {"path": model, "compute": "float32", "serve": "float32"}, "engine": {"kind": "hf"},
    "sampling": {"max_tokens": 5}, "objective": {"preset": "rec-oneside-nois", "zero_variance_mask": False},
    "task": {"name": task, "scorers": 1},
})
directory = RunDirectory(Path(place))
directory.create(config)
train(config, directory)
"""


def walk(checkout: Path) -> dict[str, list[str]]:
    """Return the files of each route in the order in which they are first passed."""
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        (root / "model").mkdir()
        save_model(root / "model")
        (root / "site").mkdir()
        (root / "site" / "sitecustomize.py").write_text(WATCH, encoding="utf-8")
        (root / "digits.py").write_text(TASK, encoding="utf-8")
        environment = {
            **os.environ,
            "PYTHONPATH": f"{root / 'site'}{os.pathsep}{checkout / 'src'}",
            "OFFBEAT_WALK": str(root / "passed"),
        }
        command = [sys.executable, "-c", RUN, str(root / "model"), str(root / "digits.py"), str(root / "run")]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        lines = (root / "passed").read_text(encoding="utf-8").splitlines()
    passed: dict[str, list[str]] = {route: [] for route in GOALS}
    for line in lines:  # the run and its scoring processes each report a file once
        route, _, file = line.partition(" ")
        if file not in passed[route] and not file.startswith("types"):
            passed[route].append(file)
    return passed


def main(short: bool) -> bool:
    """Print the routes of this tree, and record them beside those of the earlier commit."""
    now = walk(ROOT)
    for route, files in now.items():
        print(f"{route}: {len(files)} files\n  " + "\n  ".join(files))
    if short:
        return True
    with earlier_checkout() as before:
        then = walk(before)
    figures = [
        Figure(
            f"rooms.2.{route}",
            f"files that a {route} passes, types.py left out",
            f"≤ {GOALS[route]}",
            len(files),
            "files",
            len(files) <= GOALS[route],
            1,
            f"{len(then[route])} at {BEFORE}, same script; each has a subject of its own. Now: {', '.join(files)}",
        )
        for route, files in now.items()
    ]
    return record(*figures)


if __name__ == "__main__":
    sys.exit(not main(command_parser(__doc__, short="this tree only; record nothing").parse_args().short))
