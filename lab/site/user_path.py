"""Try what a new user does: install, run the quickstart, make mistakes in a configuration, ask for help.

    python -m lab.site.user_path quickstart   a new environment, `pip install`, `offbeat quickstart`: rows
                                              user-path.1*; about 4 minutes
    python -m lab.site.user_path check        `offbeat check` on every broken configuration, each in a process of its
                                              own: rows user-path.3*; minutes
    python -m lab.site.user_path answers      the help of every command, the explanation of every metric and setting:
                                              rows user-path.4*; about a minute

`--short` records nothing: the quickstart trains two steps in this environment, and three files are checked.
"""

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

from lab.figures import ROOT, Figure, command_parser, machine, record
from offbeat.cli.main import app
from offbeat.config.knobs import knobs
from offbeat.metrics import METRICS
from offbeat.run.journal import read
from offbeat.run.sinks import metrics_of
from tests.fixtures.attacks.broken_configs import Broken, cases, make_places
from tests.fixtures.processes import OFFBEAT
from tests.fixtures.runs import DIGITS_TASK
from tests.fixtures.tiny_model import save_model

TRANSCRIPT = ROOT / "docs" / "quickstart-transcript.txt"
INSTALL = ("-c constraints.txt .[train,report]",)
"""README's command for a machine without a GPU."""
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
    """Yield the words of every command."""
    for command in group.registered_commands:
        assert command.callback is not None
        yield (*before, command.name or command.callback.__name__)
    for inner in group.registered_groups:
        assert inner.typer_instance is not None and inner.name is not None
        yield from commands(inner.typer_instance, (*before, inner.name))


def shows_itself(group: typer.Typer, words: tuple[str, ...]) -> bool:
    """Return True if the help of a command contains an example of that command below its usage line."""
    result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(group, [*words, "--help"])
    below = re.sub(r"\s+", " ", result.output).partition("[OPTIONS]")[2]
    return result.exit_code == 0 and f"offbeat {' '.join(words)}" in below


def quickstart(short: bool) -> bool:
    """Rows user-path.1*: the quickstart in a new environment."""
    with tempfile.TemporaryDirectory() as place:
        begun = time.monotonic()
        bin_ = Path(sys.executable).parent if short else install_into(Path(place) / "venv")
        installed = time.monotonic() - begun
        words = ["quickstart", *(["--steps", "2"] if short else [])]
        begun = time.monotonic()
        done = subprocess.run([bin_ / "offbeat", *words], cwd=place, capture_output=True, text=True)
        seconds = time.monotonic() - begun
        output = done.stdout + (done.stderr if done.returncode else "")  # progress goes to stderr
        print(output)
        if short:
            return done.returncode == 0
        report = (Path(place) / "runs" / "quickstart" / "report.html").stat().st_size
    TRANSCRIPT.write_text(_transcript(output, seconds), encoding="utf-8")
    rates = re.search(r"pass rate ([\d.]+) -> ([\d.]+)", output)
    assert rates, "the quickstart did not print its pass rates"
    first, last = float(rates[1]), float(rates[2])
    trained_on = statistics.fmean(float(reward) for reward in re.findall(r"reward (\S+)", output)[-10:])
    note = f"installation {installed:.0f} s before; report {report} bytes; {machine()}; transcript in docs/"
    return record(
        Figure("user-path.1", "offbeat quickstart in a new environment, after installation", "<= 300 s",
               round(seconds, 1), "s", done.returncode == 0 and seconds <= 300, 1, note),
        Figure("user-path.1.before", "pass rate of the model it makes", "<= 0.5", first, "", first <= 0.5, 400),
        Figure("user-path.1.after", "pass rate on held-out prompts after training with lag up to 4", ">= 0.9", last,
               "", last >= 0.9, 400, f"on the training prompts of the last ten steps: {trained_on:.2f}"),
    )  # fmt: skip


def install_into(venv: Path) -> Path:
    """Make a new environment with offbeat in it, and return the directory of its programs."""
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    for what in INSTALL:
        subprocess.run([venv / "bin" / "pip", "install", "--quiet", *what.split()], cwd=ROOT, check=True)
    return venv / "bin"


def _transcript(output: str, seconds: float) -> str:
    commands = ["python -m venv venv", *(f"venv/bin/pip install {what}" for what in INSTALL), "offbeat quickstart"]
    return "".join(f"$ {line}\n" for line in commands) + output + f"\n({seconds:.0f} s on {os.cpu_count()} cores)\n"


def check(short: bool) -> bool:
    """Rows user-path.3*: `offbeat check` on each broken file, in a process of its own, as a user would run it."""
    answered = 0
    walls: list[float] = []
    processor: list[float] = []
    chosen = cases()[:3] if short else cases()
    with tempfile.TemporaryDirectory() as place:
        make_places(Path(place))
        file = Path(place) / "run.toml"
        for case in chosen:
            file.write_text(case.text(Path(place)), encoding="utf-8")
            begun, used = time.monotonic(), _processor_seconds()
            done = subprocess.run([OFFBEAT, "check", file], capture_output=True, text=True)
            walls.append(time.monotonic() - begun)
            processor.append(_processor_seconds() - used)
            lines = without_progress(done.stderr)
            good = done.returncode == 2 and len(lines) == 2 and all(part in lines[0] for part in case.says)
            answered += good
            print(f"{walls[-1]:.2f} s  {'ok' if good else 'WRONG MESSAGE'}  {case.name}", flush=True)
    if short:
        return answered == len(chosen)
    return record(
        Figure("user-path.3", "broken configurations answered by one message with key, value and fix", ">= 40, all",
               answered, f"of {len(chosen)}", answered == len(chosen) >= 40, len(chosen)),
        Figure("user-path.3.seconds", "slowest offbeat check, a process of its own", "<= 1 s", round(max(walls), 2),
               "s", max(walls) <= 1, len(chosen), _timing_note(dict(zip(chosen, walls, strict=True)), processor)),
    )  # fmt: skip


def without_progress(output: str) -> list[str]:
    """Return the lines of a command without those that only show that it works."""
    return [line for line in output.strip().split("\n") if not re.fullmatch(r"[a-z ]+ \.+", line)]


def _processor_seconds() -> float:
    """Return the processor time of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _timing_note(walls: dict[Broken, float], processor: list[float]) -> str:
    """Describe the times. Cases that open an experience log import Lance, pyarrow and pandas: they count separately."""
    logs = [wall for case, wall in walls.items() if 'log"' in case.toml]
    others = [wall for case, wall in walls.items() if 'log"' not in case.toml]
    within = f"{sum(seconds <= 1 for seconds in processor)} of {len(processor)} within 1 s of processor time"
    return (
        f"median {statistics.median(walls.values()):.2f} s; {within}; the {len(logs)} that open an experience log "
        f"import Lance, pyarrow and pandas, {max(logs):.2f} s at most, the others {max(others):.2f}; {machine()}"
    )


def answers(short: bool) -> bool:
    """Rows user-path.4*: help with an example, metrics declared and emitted, everything explained."""
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
    """Return the metrics in events.jsonl of a small run with every feature on."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        save_model(place / "model")
        (place / "run.toml").write_text(RUN.format(model=place / "model", task=DIGITS_TASK), encoding="utf-8")
        subprocess.run([OFFBEAT, "train", "run.toml", "--out", "run"], cwd=place, check=True, capture_output=True)
        return {metric for event in read(place / "run" / "events.jsonl") for metric in metrics_of(event)}


def main() -> None:
    parser = command_parser(__doc__, short="a small part; record nothing")
    parts = {"quickstart": quickstart, "check": check, "answers": answers}
    parser.add_argument("what", choices=parts)
    args = parser.parse_args()
    sys.exit(not parts[args.what](args.short))


if __name__ == "__main__":
    main()
