"""How long offbeat is silent, and how far its estimates of time are from what runs take.

    python -m lab.site.waits silence      eight paths in Python and four on the command line, each in a process of its
                                          own: row door.7.silence; 15 minutes
    python -m lab.site.waits estimates    five configurations, each estimated and then run: row door.7.estimates; 10
                                          minutes

`--short` tries two paths, or one configuration, and records nothing.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from lab.figures import Figure, command_parser, machine, report
from tests.fixtures.processes import OFFBEAT
from tests.fixtures.watched import watch

SILENCE: Final = 2.0
"""Seconds: the goal for the longest time without output, from the start of the process to its last line."""
OWN: Final = """
import offbeat

def correct(completions, answer, **columns):
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]

rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
run = offbeat.train("model", correct, rows, steps=10, sync={"every": 5}, max_tokens=4, learning_rate=4e-4, out="own")
"""
PYTHON: Final = {
    "tiny_model": "import offbeat; offbeat.tiny_model('model')",
    "train": OWN,
    "resume": "import offbeat; offbeat.resume('own', steps=14)",
    "evaluate": "import offbeat; print(offbeat.evaluate('own')[0])",
    "metrics and plot": "import offbeat; run = offbeat.Run('own'); print(run.metrics.tail()); run.plot(to='curve.svg')",
    "report": "import offbeat; print(offbeat.report('own'))",
    "generate": "import offbeat; print(offbeat.Run('own').generate('1+2='))",
    "export": "import offbeat; print(offbeat.Run('own').export('exported'))",
}
"""In this order: later paths use what earlier ones made."""
UNTRAINED: Final = "from pathlib import Path; from offbeat.run.quickstart import make_model; " + (
    "make_model(Path('model'), steps=1)"
)
"""Time does not depend on what a model has learned."""
COMMANDS: Final = {
    "offbeat check": "check {recipe} --set steps=6",
    "offbeat train": "train {recipe} --set steps=6 --out again",
    "offbeat eval": "eval own",
    "offbeat quickstart": "quickstart --steps 4",
}
TINY: Final = {
    "model": {"path": "model", "compute": "float32", "serve": "float32"},
    "engine": {"kind": "hf"},
    "task": {"name": "arithmetic", "options": {"digits": 1}},
    "sampling": {"max_tokens": 4},
    "steps": 20,
    "prompts_per_step": 32,
}
CONFIGURATIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "tiny, sync every 10": TINY | {"sync": {"every": 10}, "prompts_per_step": 64},
    "tiny, on-policy, evaluated often": TINY | {"evaluation": {"every": 5}},
    "tiny, 4 updates a batch": TINY | {"updates_per_batch": 4, "sync": {"every": 5}},
    "tiny, small micro-batches": TINY
    | {"trainer": {"token_budget": 128}, "engine": {"kind": "hf", "max_prompt_tokens": 16}},
    "tiny, offline on the log of the first": TINY
    | {
        "run": {"mode": "offline", "experience": "tiny,-sync-every-10/experience"},
        "sampler": {"mode": "offline"},
        "objective": {"preset": "asymre"},
    },
}


def silence(short: bool) -> bool:
    """Run every path and note its longest silence."""
    found: list[tuple[str, float, int]] = []
    with tempfile.TemporaryDirectory(prefix="offbeat-lab-") as name:
        place = Path(name)
        (place / "run.toml").write_text(RECIPE, encoding="utf-8")
        paths = {}
        for number, (what, text) in enumerate(PYTHON.items()):
            (place / f"path{number}.py").write_text(text, encoding="utf-8")
            paths[what] = [sys.executable, f"path{number}.py"]
        paths |= {what: [OFFBEAT, *words.format(recipe="run.toml").split()] for what, words in COMMANDS.items()}
        for what, command in list(paths.items())[: 2 if short else None]:
            one = watch(command, place, terminal=False)
            longest = max(one.first, *(b - a for a, b in zip(one.moments, one.moments[1:], strict=False)), 0.0)
            found.append((what, longest, one.code))
            ending = one.seconds - (one.moments or (0.0,))[-1]
            print(f"{what:18} silent {longest:5.2f} s of {one.seconds:5.1f} s, {ending:.2f} s after its last line, "
                  f"code {one.code}", flush=True)  # fmt: skip
            if one.code:
                print(one.output[-3000:])
    worst = max(found, key=lambda one: one[1])
    late = [what for what, longest, _ in found if longest > SILENCE]
    failed = [what for what, _, code in found if code]
    note = (
        f"worst: {worst[0]}; median {statistics.median(one[1] for one in found):.2f} s; {len(late)} of {len(found)} "
        f"longer than the goal{': ' + ', '.join(late) if late else ''}; through a pipe, from the start of the process "
        f"to its last line, imports included; {machine()}" + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    return report(short, Figure("door.7.silence", "longest time without output, 8 paths in Python and 4 commands",
                                f"<= {SILENCE:g} s", round(worst[1], 2), "s", not late and not failed, len(found),
                                note))  # fmt: skip


RECIPE: Final = """
prompts_per_step = 16
[model]
path = "model"
compute = "float32"
serve = "float32"
[engine]
kind = "hf"
[task]
name = "arithmetic"
options = { digits = 1 }
[sampling]
max_tokens = 4
[evaluation]
every = 3
"""


def estimates(short: bool) -> bool:
    """Estimate each configuration as `offbeat check` does, run it, and compare."""
    ratios: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="offbeat-lab-") as name:
        place = Path(name)
        os.chdir(place)
        subprocess.run([sys.executable, "-c", UNTRAINED], check=True, cwd=place)
        for what, settings in list(CONFIGURATIONS.items())[: 1 if short else None]:
            ratios[what] = _ratio(what, settings, place)
    worst = max(ratios, key=lambda one: max(ratios[one], 1 / ratios[one]))
    listed = ", ".join(f"{what} {ratio:.2f}" for what, ratio in ratios.items())
    return report(short, Figure("door.7.estimates", "estimated time of a run over measured, worst of 5 configurations",
                                "0.5 to 2", round(ratios[worst], 2), "ratio",
                                all(0.5 <= one <= 2 for one in ratios.values()), len(ratios),
                                f"{listed}; estimated before each run from its files, its data and the speed of the "
                                f"moment, the share of the processor that is free measured for two seconds before and "
                                f"after; measured: the phases of the run; a model of 0.1 M; {machine()}"))  # fmt: skip


def _ratio(what: str, settings: Mapping[str, Any], place: Path) -> float:
    from offbeat.config import parse
    from offbeat.preflight.forecast import ModelFiles, data_lengths, forecast, speed_now

    config = parse(settings)
    files = ModelFiles(Path(config.model.path))
    expected = forecast(config, files, data_lengths(config, files))
    before = speed_now(2.0)
    out = place / what.replace(" ", "-")
    text = (
        f"import json, offbeat; offbeat.train(json.loads({json.dumps(settings)!r}), out={str(out)!r}, progress=False)"
    )
    subprocess.run([sys.executable, "-c", text], check=True, cwd=place)
    free = (before.free + speed_now(2.0).free) / 2
    ended = json.loads((out / "events.jsonl").read_text().splitlines()[-1])
    measured = sum(cast("dict[str, float]", ended["seconds"]).values())
    estimated = expected.seconds(before) * config.steps / free
    print(
        f"{what:34} estimated {estimated:.1f} s, measured {measured:.1f} s; {before.products / 1e9:.0f} GFLOP/s, "
        f"a call {1e6 * before.call:.2f} µs, {free:.2f} of the processor free; {ended['seconds']}",
        flush=True,
    )
    return estimated / measured


if __name__ == "__main__":
    parser = command_parser(__doc__, short="two paths, or one configuration; record nothing")
    parts = {"silence": silence, "estimates": estimates}
    parser.add_argument("what", choices=parts)
    args = parser.parse_args()
    sys.exit(not parts[args.what](args.short))
