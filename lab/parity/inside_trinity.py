"""Check our presets and the log inside the real Trinity-RFT: found by dotted path, in its own registries and classes.

    python -m lab.parity.inside_trinity            a minute; writes rows inside.5.*
    python -m lab.parity.inside_trinity --short    nothing recorded

Trinity-RFT is installed into a directory of its own (`hosts.py`), with verl beside it. Gradients are of its `rec` loss
and of ours on the same tensors. Experiences are made up, of three versions, and read back from the log.
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from lab.figures import Figure, command_parser, report
from lab.parity import hosts
from lab.parity.inside_verl import difference, draw, refused

REC: dict[str, dict[str, Any]] = {
    "rec-oneside-is": {"clip_mode": "one-side", "weight": "importance_sampling"},
    "rec-oneside-nois": {"clip_mode": "one-side"},
    "rec-twoside": {"clip_mode": "two-side"},
    "rec-ring": {"clip_mode": "ring", "epsilon_low_prime": 0.6, "epsilon_high_prime": 2.0},
    "reinforce": {},
    "opmd-token": {"regularizer": "k2", "regularizer_coef": 0.05},
}
"""Presets and the arguments of Trinity's `rec` with the same formula."""
LAGS = {0: 5, 2: 3, 5: 0}
"""Version and lag of each made-up group, in explore step 6."""


def gradient(loss: Any, batch: dict[str, Any]) -> Tensor:
    policy_NT = batch["policy"].clone().requires_grad_()
    total, _ = loss(
        logprob=policy_NT,
        old_log_probs=batch["old"],
        rollout_log_probs=batch["old"],
        response_mask=batch["mask"],
        advantages=batch["advantages"],
    )
    total.backward()
    found: Tensor = policy_NT.grad
    return found


def experiences() -> list[Any]:
    """Return groups of four experiences, one of each version, in explore step 6."""
    from trinity.common.experience import EID, Experience

    rng, made = torch.Generator().manual_seed(0), []
    for version in LAGS:
        for run in range(4):
            tokens = torch.randint(2, 50, (int(torch.randint(5, 9, (), generator=rng)),), generator=rng)
            answer = len(tokens) - 3
            made.append(
                Experience(
                    eid=EID(batch=6, task=f"t{version}", run=run),
                    tokens=tokens,
                    prompt_length=3,
                    logprobs=-torch.rand(answer, generator=rng),
                    reward=float(run == 0),
                    action_mask=torch.ones(answer, dtype=torch.bool),
                    info={"model_version": version},
                )
            )
    return made


def inside() -> dict[str, Any]:
    """Measure everything in a process in which Trinity-RFT is imported."""
    from importlib.metadata import version

    from trinity.algorithm import ADVANTAGE_FN, POLICY_LOSS_FN
    from trinity.buffer.operators import EXPERIENCE_OPERATORS
    from trinity.common.experience import group_by

    from offbeat.experience.reader import LogReader
    from offbeat.objective.credit import drop_surplus
    from offbeat.types import Score

    ours = POLICY_LOSS_FN.get("offbeat.inside.trinity.PresetLoss")
    found: dict[str, Any] = {"version": version("trinity-rft")}
    worst: dict[str, float] = {}
    for name, arguments in REC.items():
        theirs = POLICY_LOSS_FN.get("rec")(backend="verl", **arguments)
        for seed in range(5):
            batch = draw(seed)
            rng = torch.Generator().manual_seed(seed)
            batch["advantages"] = torch.randn(len(batch["mask"]), 1, generator=rng) * batch["mask"]
            apart = difference(gradient(ours(preset=name), batch), gradient(theirs, batch))
            worst[name] = max(worst.get(name, 0.0), apart)
    batch = draw(0) | {"advantages": batch["mask"].float()}
    both = refused(lambda: gradient(ours(preset="tis"), batch))
    unserved = [refused(partial(ours, preset=name)) for name in ("m2po", "ess-gate")]

    made = experiences()
    assign = ADVANTAGE_FN.get("offbeat.inside.trinity.PresetAdvantage")
    kept = assign(preset="red-drop").process(experiences())[0]
    rewards_BG = torch.tensor([[1.0, 0, 0, 0]] * len(LAGS))
    due = int(drop_surplus(rewards_BG, torch.ones_like(rewards_BG).bool(), range(len(LAGS))).sum())
    with tempfile.TemporaryDirectory() as place:
        operator = EXPERIENCE_OPERATORS.get("offbeat.inside.trinity.KeepLog")(out=place)
        passed_on, lag = asyncio.run(operator.process(made))
        asyncio.run(operator.close())
        groups = list(LogReader.open(f"{place}/experience").groups())
    matched = 0
    for group, (name, members) in zip(groups, group_by(made, id_type="task").items(), strict=True):
        matched += group.oldest_version == int(name.rpartition("t")[2]) and all(
            one.token_ids.tolist() == made_one.tokens[3:].tolist()
            and made_one.logprobs.tolist() == list(map(float, cast(Any, one.behavior_logprobs)))
            and one.score == Score(made_one.reward)
            for one, made_one in zip(group.completions, members, strict=True)
        )
    found |= {"rec": worst, "refused": [both, *unserved], "kept": len(kept), "due": due, "groups": matched}
    lags = [one for one in LAGS.values() for _ in range(4)]
    right = [lag["offbeat/lag/mean"] == sum(lags) / len(lags), lag["offbeat/lag/max"] == max(lags)]
    return found | {"lag": lag, "lag_right": all(right) and passed_on == made}


def figures() -> Iterator[Figure]:
    done = hosts.run("trinity", "lab.parity.inside_trinity", "--inside")
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    found = json.loads(done.stdout.strip().splitlines()[-1])
    note = f"Trinity-RFT {found['version']}, by dotted path through its registries; float32, CPU"
    worst = max(found["rec"].values())
    what = f"gradient of PresetLoss against Trinity's rec, {', '.join(found['rec'])}"
    each = ", ".join(f"{name} {one:.1e}" for name, one in found["rec"].items())
    yield Figure(
        "inside.5.rec", what, "<= 1e-6", float(f"{worst:.1e}"), "relative", worst <= 1e-6, 5, f"{each}; {note}"
    )
    what = "experiences that PresetAdvantage passes on with red-drop, as many as drop_surplus keeps"
    yield Figure(
        "inside.5.credit",
        what,
        f"{found['due']}",
        found["kept"],
        "experiences",
        found["kept"] == found["due"],
        12,
        note,
    )
    what = "made-up groups whose version, tokens, log-probs and rewards come back from the log of KeepLog"
    held = found["groups"] == len(LAGS)
    yield Figure("inside.5.groups", what, f"{len(LAGS)}", found["groups"], "groups", held, len(LAGS), note)
    what = "mean and largest lag that KeepLog reports for groups of versions 0, 2 and 5 in explore step 6"
    lag = f"{found['lag']['offbeat/lag/mean']:.2f} and {found['lag']['offbeat/lag/max']:.0f}"
    yield Figure("inside.5.lag", what, "2.67 and 5", lag, "steps", found["lag_right"], 12, note)
    said = sum(map(bool, found["refused"]))
    what = "presets refused with the reason: a first look, and two streams of which Trinity made one"
    yield Figure("inside.5.refused", what, "3 of 3", said, "refused", said == 3, 3, note)


def main() -> bool:
    parser = command_parser(__doc__, short="record nothing")
    parser.add_argument("--inside", action="store_true", help="measure here, where Trinity-RFT can be imported")
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(inside()))
        return True
    return report(options.short, *figures())


if __name__ == "__main__":
    sys.exit(not main())
