"""The user's path, walked: from an empty virtual environment to a report, through broken files, past every command.

    python -m lab.site.user_path quickstart   a new environment, `pip install`, `offbeat quickstart`; about 4 minutes
    python -m lab.site.user_path check        every broken configuration in a process of its own
    python -m lab.site.user_path answers      help of every command, explanation of every metric and setting

`--short` records nothing: the quickstart makes few steps in the environment at hand, and a few files are checked.
"""

import argparse
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import typer
from typer.testing import CliRunner

from lab.attacks.broken_configs import Broken, cases, make_places
from lab.figures import ROOT, Figure, record
from lab.fixtures.tiny_model import save_model
from offbeat.cli.main import app
from offbeat.config.knobs import knobs
from offbeat.metrics import METRICS
from offbeat.run.journal import read
from offbeat.run.sinks import metrics_of

TRANSCRIPT = ROOT / "docs" / "quickstart-transcript.txt"
INSTALL = ("-c constraints.txt torch", "-c constraints.txt .[train,report]")
"""torch first: a requirement that admits a newer one would fetch gigabytes of CUDA."""
RUN = """
steps = 3
prompts_per_step = 4
group_size = 4
[objective]
kl_coefficient = 0.01
[sync]
every = 2
[model]
path = "{model}"
compute = "float32"
serve = "float32"
[task]
name = "{task}"
[engine]
kind = "hf"
[sampling]
max_tokens = 5
[evaluation]
every = 1
prompts = 4
"""


def commands(group: typer.Typer = app, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command."""
    for command in group.registered_commands:
        assert command.callback is not None
        yield (*before, command.name or command.callback.__name__)
    for inner in group.registered_groups:
        assert inner.typer_instance is not None and inner.name is not None
        yield from commands(inner.typer_instance, (*before, inner.name))


def shows_itself(group: typer.Typer, words: tuple[str, ...]) -> bool:
    """Whether the help of a command, below its usage line, has that command in it."""
    result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(group, [*words, "--help"])
    below = re.sub(r"\s+", " ", result.output).partition("[OPTIONS]")[2]
    return result.exit_code == 0 and f"offbeat {' '.join(words)}" in below


def quickstart(short: bool) -> bool:
    """A new environment, and what its owner sees."""
    with tempfile.TemporaryDirectory() as place:
        begun = time.monotonic()
        bin_ = Path(sys.executable).parent if short else _install(Path(place) / "venv")
        installed = time.monotonic() - begun
        words = ["quickstart", *(["--steps", "2"] if short else [])]
        begun = time.monotonic()
        done = subprocess.run([bin_ / "offbeat", *words], cwd=place, capture_output=True, text=True)
        seconds = time.monotonic() - begun
        print(said := done.stdout + done.stderr)
        if short:
            return done.returncode == 0
        report = (Path(place) / "runs" / "quickstart" / "report.html").stat().st_size
    TRANSCRIPT.write_text(_transcript(said, seconds), encoding="utf-8")
    rates = re.search(r"pass rate (\S+) -> (\S+) with", said)
    assert rates, "the quickstart ends in its pass rates"
    first, last = float(rates[1]), float(rates[2])
    load = f"load of the machine before: {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores"
    note = f"installation {installed:.0f} s before; report {report} bytes; {load}; transcript in docs/"
    return record(
        Figure("user-path.1", "offbeat quickstart in a new environment, after installation", "<= 300 s",
               round(seconds, 1), "s", done.returncode == 0 and seconds <= 300, 1, note),
        Figure("user-path.1.before", "pass rate of the model it makes", "<= 0.5", first, "", first <= 0.5, 400),
        Figure("user-path.1.after", "pass rate after training with lag up to 9", ">= 0.9", last, "", last >= 0.9, 400),
    )  # fmt: skip


def _install(venv: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    for what in INSTALL:
        subprocess.run([venv / "bin" / "pip", "install", "--quiet", *what.split()], cwd=ROOT, check=True)
    return venv / "bin"


def _transcript(said: str, seconds: float) -> str:
    commands = ["python -m venv venv", *(f"venv/bin/pip install {what}" for what in INSTALL), "offbeat quickstart"]
    return "".join(f"$ {line}\n" for line in commands) + said + f"\n({seconds:.0f} s on {os.cpu_count()} cores)\n"


def check(short: bool) -> bool:
    """Each file in a process of its own, as a person does it."""
    offbeat, answered = Path(sys.executable).parent / "offbeat", 0
    walls: list[float] = []
    works: list[float] = []
    chosen = cases()[:3] if short else cases()
    with tempfile.TemporaryDirectory() as place:
        make_places(Path(place))
        file = Path(place) / "run.toml"
        for case in chosen:
            file.write_text(case.text(Path(place)), encoding="utf-8")
            begun, worked = time.monotonic(), _work()
            done = subprocess.run([offbeat, "check", file], capture_output=True, text=True)
            walls.append(time.monotonic() - begun)
            works.append(_work() - worked)
            lines = done.stderr.strip().split("\n")
            good = done.returncode == 2 and len(lines) == 2 and all(part in lines[0] for part in case.says)
            answered += good
            print(f"{walls[-1]:.2f} s  {'as it should be' if good else 'NOT AS IT SHOULD BE'}  {case.name}", flush=True)
    if short:
        return answered == len(chosen)
    return record(
        Figure("user-path.3", "broken configurations answered by one message with key, value and way out", ">= 40, all",
               answered, f"of {len(chosen)}", answered == len(chosen) >= 40, len(chosen)),
        Figure("user-path.3.seconds", "slowest offbeat check, a process of its own", "<= 1 s", round(max(walls), 2),
               "s", max(walls) <= 1, len(chosen), _circumstances(dict(zip(chosen, walls, strict=True)), works)),
    )  # fmt: skip


def _work() -> float:
    """Processor seconds of all processes started so far and ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _circumstances(walls: dict[Broken, float], works: list[float]) -> str:
    """Those that look into an experience log import Lance, and with it pyarrow and pandas: they are told apart."""
    logs = [wall for case, wall in walls.items() if 'log"' in case.toml]
    others = [wall for case, wall in walls.items() if 'log"' not in case.toml]
    within = f"{sum(work <= 1 for work in works)} of {len(works)} within 1 s of processor time"
    load = f"load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    return (
        f"median {statistics.median(walls.values()):.2f} s; {within}; the {len(logs)} that look into an experience log "
        f"import Lance, and with it pyarrow and pandas, {max(logs):.2f} s at most, the others {max(others):.2f}; {load}"
    )


def answers(short: bool) -> bool:
    """Help with an example, metrics declared and emitted, everything explained."""
    every = list(commands())
    helped = [shows_itself(app, words) for words in every]
    emitted = _emitted()
    run = CliRunner(env={"COLUMNS": "200"}).invoke
    names = [*METRICS, *knobs()]
    explained = sum(run(app, ["explain", name]).exit_code == 0 for name in names)
    print(
        f"emitted and not declared: {sorted(emitted - METRICS.keys())}; not emitted: {sorted(METRICS.keys() - emitted)}"
    )
    if short:
        return all(helped)
    return record(
        Figure("user-path.4", "commands whose --help has an example of themselves", "all", sum(helped),
               f"of {len(every)}", all(helped), len(every)),
        Figure("user-path.4.metrics", "declared metrics emitted by a run of three steps, none undeclared", "all",
               len(emitted & METRICS.keys()), f"of {len(METRICS)}", emitted == METRICS.keys(), len(METRICS),
               "a run's journal refuses a metric that is not declared"),
        Figure("user-path.4.explain", "metrics and settings that offbeat explain answers for", "all", explained,
               f"of {len(names)}", explained == len(names), len(names)),
    )  # fmt: skip


def _emitted() -> set[str]:
    """Metrics in events.jsonl of a small run with everything switched on."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        save_model(place / "model")
        task = ROOT / "tests" / "run" / "digits_task.py"
        (place / "run.toml").write_text(RUN.format(model=place / "model", task=task), encoding="utf-8")
        offbeat = Path(sys.executable).parent / "offbeat"
        subprocess.run([offbeat, "train", "run.toml", "--out", "run"], cwd=place, check=True, capture_output=True)
        return {metric for event in read(place / "run" / "events.jsonl") for metric in metrics_of(event)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"quickstart": quickstart, "check": check, "answers": answers}
    parser.add_argument("what", choices=parts)
    parser.add_argument("--short", action="store_true")
    args = parser.parse_args()
    sys.exit(0 if parts[args.what](args.short) else 1)


if __name__ == "__main__":
    main()
