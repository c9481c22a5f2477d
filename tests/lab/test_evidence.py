"""The verdicts of the evidence follow the rules of its protocol, on numbers computed by hand."""

import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from lab.learning import model
from lab.learning.evidence.arms import RATES, TUNING, EvidenceArm
from lab.learning.evidence.block_claims import CLAIMS, groups_to_goal, seconds_to_goal
from lab.learning.evidence.blocks import BLOCKS, CONDITION_BLOCKS, P2_BASES, SETTINGS, Block
from lab.learning.evidence.cells import _by_cycle, make_config
from lab.learning.evidence.claims import UNDECIDED, Cells, Claim, Paired, beside_before, judge
from lab.learning.evidence.paper_claims import at_equal_kl
from lab.learning.evidence.regret import regret_figures
from lab.learning.evidence.rows import EvidenceRow, Key, area, final
from lab.learning.evidence.smollm2 import ARMS, SEEDS, Runs, SmolRow, command, sweep_parser
from lab.learning.evidence.smollm2 import figures as smollm2_figures
from lab.learning.evidence.tasks import TASKS
from lab.learning.evidence.transfer import CANDIDATES, of_sums
from lab.learning.evidence.transfer import figures as transfer_figures
from lab.learning.statistics import Interval, holm_levels, p_value, student_limit, student_tail


def row(arm: str, rate: float, seed: int, level: float, groups: int = 100) -> EvidenceRow:
    """Return a run that starts at 0.2 and then stays at `level`, with 1 / 1000 more for each seed."""
    return {
        "arm": arm,
        "rate": rate,
        "seed": seed,
        "curve": [0.2, *[level + seed / 1000] * 5],
        "groups": [groups * point for point in range(6)],
        "publishes": 2,
        "published": [5, 20],
        "drift": 0.01,
        "by_cycle": {"ess": (0.9, 0.8)},
        "kl": [0.0, *[level + seed / 1000] * 5],
        "lag": 1.0,
        "seconds": 20.0,
        "commit": "abc",
        "stopped": "",
    }


def tuned(arm: str, best: float) -> dict[Key, EvidenceRow]:
    """Return finished tuning cells whose area is highest at `best`."""
    return {
        (arm, rate, seed): row(arm, rate, seed, 0.5 - 0.05 * abs(math.log2(rate / best)))
        for rate, seed in product(RATES, TUNING)
    }


def claim(values: list[float], *edges: float) -> Claim:
    return Claim("evidence.x", "", "", Paired(("one", "two"), values), edges, "yes", "no", "")


def test_student_agrees_with_published_tables() -> None:
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 11: 2.201, 19: 2.093, 39: 2.023}
    assert {freedom: round(student_limit(freedom), 3) for freedom in table} == table
    assert student_limit(10, 0.01) == pytest.approx(3.169, abs=5e-4)
    assert student_tail(0.0, 7) == pytest.approx(1.0)


def test_the_p_value_and_the_interval_decide_alike() -> None:
    values = [0.01, 0.03, 0.02, 0.05, 0.00]
    p = p_value(values, 0.0)
    assert Interval.of(values, p * 1.001).low > 0 > Interval.of(values, p * 0.999).low


def test_holm_gives_the_smallest_p_value_the_strictest_level_and_stops_at_the_first_failure() -> None:
    assert holm_levels([0.04, 0.001, 0.02, 0.9]) == pytest.approx([0.05 / 3, 0.05 / 4, 0.05 / 3, 0.05 / 3])
    assert holm_levels([0.01, 0.02]) == pytest.approx([0.025, 0.05])


@pytest.mark.parametrize(
    ("values", "edges", "word"),
    [
        ([0.10, 0.11, 0.12], (0.0,), "yes"),
        ([-0.10, -0.11, -0.12], (0.0,), "no"),
        ([-0.10, 0.11, 0.02], (0.0,), UNDECIDED),
        ([-0.001, 0.001, 0.0], (-0.02, 0.02), "yes"),
        ([0.050, 0.051, 0.052], (-0.02, 0.02), "no"),
        ([-0.050, -0.051, -0.052], (-0.02, 0.02), "no"),
        ([0.010, 0.020, 0.030], (-0.02, 0.02), UNDECIDED),
    ],
)
def test_an_interval_is_held_against_its_margins(values: list[float], edges: tuple[float, ...], word: str) -> None:
    [verdict] = judge([claim(values, *edges)])
    assert verdict.word == word
    assert verdict.holds == (word == "yes")


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ([0.010, 0.011, 0.012], "yes"),
        ([0.001, 0.002, 0.0], "no"),
        ([-0.1, -0.1, -0.11], "no"),
        ([0.0, 0.01], UNDECIDED),
    ],
)
def test_a_gain_too_small_to_matter_is_decided_by_a_margin_of_its_own(values: list[float], word: str) -> None:
    [verdict] = judge([replace(claim(values, 0.0), below_edge=0.005)])
    assert verdict.word == word


def test_a_claim_that_would_hold_alone_is_undecided_among_many() -> None:
    weak, lost = claim([0.01, 0.03, 0.02, 0.05, 0.005], 0.0), claim([-1.0, 1.0, 0.5, -0.4, 0.1], 0.0)
    assert 0.025 < p_value(weak.values, 0.0) < 0.05
    assert [one.word for one in judge([weak])] == ["yes"]
    assert [one.word for one in judge([weak, lost])] == [UNDECIDED, UNDECIDED]


def test_groups_to_the_goal_lie_on_a_line_between_two_evaluations() -> None:
    one = row("x", 1e-3, 0, 0.0)
    one["curve"], one["groups"] = [0.2, 0.7, 0.9, 0.95], [0, 100, 200, 300]
    assert groups_to_goal(one) == pytest.approx(150)
    one["published"] = [2, 7, 8]
    assert seconds_to_goal(one, cost=2.0) == pytest.approx(7.5 + 2 * 2)  # two of three publishes are before step 7.5
    one["curve"] = [0.2, 0.3, 0.4, 0.5]
    assert groups_to_goal(one) == 300
    assert final(one) == pytest.approx(0.35)
    assert area(one) == pytest.approx(0.35)


def test_tuning_comes_before_reported_seeds_and_the_grid_grows_at_an_edge() -> None:
    block = Block("x", (EvidenceArm("one"), EvidenceArm("two", rate=1e-3)), seeds=2)
    assert len(block.ready({})) == len(RATES) * len(TUNING)
    assert block.count_missing({}) == len(RATES) * len(TUNING) + 4
    assert block.ready(tuned("one", best=5e-4)) == [
        ("one", 5e-4, 1),
        ("two", 1e-3, 1),
        ("one", 5e-4, 2),
        ("two", 1e-3, 2),
    ]
    at_edge = tuned("one", best=1e-3)
    assert block.ready(at_edge) == [("one", 2e-3, seed) for seed in TUNING]
    more = {("one", 2e-3, seed): row("one", 2e-3, seed, 0.6) for seed in TUNING}
    assert block.ready(at_edge | more) == [("one", 4e-3, seed) for seed in TUNING]
    most = {("one", 4e-3, seed): row("one", 4e-3, seed, 0.7) for seed in TUNING}
    assert block.ready(at_edge | more | most)[0] == ("one", 4e-3, 1)  # twice extended is enough


def test_an_arm_is_tuned_by_what_its_block_is_judged_by_and_a_changed_verdict_stands_beside_the_previous_one() -> None:
    arms = (EvidenceArm("one"), EvidenceArm("two", rate=5e-4))
    block = Block("x", arms, seeds=3, tuned_by=final)
    done = _made_up(block)
    for seed in TUNING:  # the larger rate ends higher, the smaller one has the larger area
        done["one", 5e-4, seed]["curve"] = [0.2, *[0.6] * 8]
        done["one", 2.5e-4, seed]["curve"] = [0.2, *[0.3] * 3, *[0.7] * 5]
    by_area = replace(block, tuned_by=area)
    assert (block.best_rate("one", done), by_area.best_rate("one", done)) == (2.5e-4, 5e-4)
    assert block.ready(done) == [("one", 2.5e-4, seed) for seed in (1, 2, 3)]
    now, before = judge([claim([0.1, 0.11, 0.12], 0.0)]), judge([claim([-0.1, 0.1, 0.2], 0.0)])
    [verdict] = beside_before(now, before)
    assert "; with rates tuned by area: +0.067, undecided; interval at level" in verdict.figure().note
    assert beside_before(now, now) == now


def test_a_row_keeps_the_mean_of_all_steps_and_of_the_last_before_each_publish() -> None:
    metrics = [{"ess": 1.0}, {"ess": 0.5, "drift_step": 0.1}, {"ess": 0.9}, {"ess": 0.4, "loss": 3.0}]
    assert _by_cycle(metrics, [1, 3]) == {"ess": (0.7, 0.45), "drift_step": (0.1, 0.1)}


def test_every_block_has_claims_about_its_own_arms() -> None:
    """With made-up cells in which nothing differs but the seed, no claim of a difference holds."""
    assert {*BLOCKS} == {*CLAIMS, *CONDITION_BLOCKS, "transfer"}
    for block in BLOCKS.values():
        assert block.task in TASKS
        done = _made_up(block)
        assert block.count_missing(done) == 0
        if block.name not in CLAIMS:
            continue
        found = judge(list(CLAIMS[block.name](Cells(block, done))))
        figures = [verdict.figure() for verdict in found]
        assert len({one.id for one in figures}) == len(figures)
        assert all(one.id.startswith(f"evidence.{block.name[0]}.{block.task}.") for one in figures)
        assert all(one.n == block.seeds and one.note for one in figures)
        gains = [one for one in figures if one.goal in ("interval above 0", "interval above 1")]
        assert not [one.id for one in gains if one.holds and "concurrent" not in one.id]  # it is faster by assumption


def _made_up(block: Block) -> dict[Key, EvidenceRow]:
    return {
        key: row
        for place, arm in enumerate(block.arms)
        for key, row in (tuned(arm.name, arm.rate or 5e-4) | _reported(arm, block.seeds, place)).items()
    }


def test_the_regret_is_that_of_the_worst_condition_against_its_best_fixed_lag() -> None:
    blocks = [Cells(BLOCKS[name], _made_up(BLOCKS[name])) for name in CONDITION_BLOCKS]
    for cells in blocks:
        for key in cells.done:
            cells.done[key]["curve"] = [0.5] * 6
    second = blocks[1]
    for seed in range(1, second.block.seeds + 1):
        second.done["v5 at 0.001", 1e-3, seed]["curve"] = [0.8] * 6
        second.done["drift at 0.001", 1e-3, seed]["curve"] = [0.7] * 6
    by_rule = {one.id: one for one in regret_figures(blocks)}
    assert by_rule["evidence.b.regret.drift"].measured == pytest.approx(0.1)
    assert by_rule["evidence.b.regret.cost-1"].measured == pytest.approx(0.3)
    assert "changing-8 at lr 0.001, best v5: +0.1000" in by_rule["evidence.b.regret.drift"].note


def test_each_arm_of_the_table_of_p2_changes_one_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "directory", lambda lessons: "made when a cell is trained")
    settings = {arm.name: make_config(TASKS["sums"], arm, 5e-4, 1).model_dump() for arm in BLOCKS["f-sums"].arms}
    for name, found in settings.items():
        base = settings[P2_BASES.get(name, "plain")]
        changed = [section for section in found if found[section] != base[section]]
        assert len(changed) == (name != "plain"), (name, changed)


def _reported(arm: EvidenceArm, seeds: int, place: int) -> dict[Key, EvidenceRow]:
    rate = arm.rate or 5e-4
    noise = [(37 * seed + 11 * place) % 17 / 1000 for seed in range(1, seeds + 1)]
    return {(arm.name, rate, seed): row(arm.name, rate, seed, 0.85 + noise[seed - 1]) for seed in range(1, seeds + 1)}


@pytest.mark.parametrize(
    ("losses", "measured"),
    [
        ((0.01, 0.02, 0.0, 0.01, 0.02), "no loss above 0.08: -0.012"),
        ((0.2, 0.21, 0.19, 0.2, 0.22), "loses more than 0.08: -0.204"),
        ((0.0, 0.2, 0.1, 0.05, 0.15), "undecided: -0.100"),
    ],
)
def test_smollm2_is_said_to_lose_only_what_its_whole_interval_loses(losses: tuple[float, ...], measured: str) -> None:
    done: Runs = {}
    for seed, loss in zip(SEEDS, losses, strict=True):
        for arm in ARMS:
            level = 0.9 - (loss if arm == "v10" else 0.0)
            curve = [0.1, 0.3, 0.5, level - 0.02, level + 0.02]
            done[arm, seed] = {
                "arm": arm, "seed": seed, "curve": curve, "groups": 320, "publishes": 40,
                "seconds": {"training": 100.0}, "commit": "abc",
            }  # fmt: skip
    by_id = {one.id: one for one in smollm2_figures(done)}
    assert str(by_id["evidence.smollm2.v1"].measured) == "0.900 ± 0.000"
    assert str(by_id["evidence.smollm2.v10-loss"].measured).startswith(measured)
    assert by_id["evidence.smollm2.v10-loss"].holds == measured.startswith("no loss")
    assert by_id["evidence.smollm2.replay-loss"].measured == "no loss above 0.08: 0.000 [0.000, 0.000]"


def test_the_first_half_of_a_kept_run_of_smollm2_is_trained_again_with_its_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept: SmolRow = {
        "arm": "v10", "seed": 2, "curve": [0.1, 0.2, 0.3, 0.4, 0.5], "groups": 320, "publishes": 4,
        "seconds": {}, "commit": "abc",
    }  # fmt: skip
    (tmp_path / "runs.jsonl").write_text(json.dumps(kept) + "\n")
    asked: list[object] = []

    def train(arm: str, settings: tuple[str, ...], seed: int, steps: int) -> SmolRow:
        asked.extend([arm, settings, seed, steps])
        return kept | {"curve": [0.1, 0.25, 0.35]}

    parser = sweep_parser("")
    command(parser.parse_args(["--again", "v10", "2"]), ARMS, tmp_path / "runs.jsonl", smollm2_figures, train)
    assert asked == ["v10", ("sync.every=10",), 2, 20]
    assert capsys.readouterr().out == "now   [0.1, 0.25, 0.35]\nkept  [0.1, 0.2, 0.3]\n"
    with pytest.raises(SystemExit, match="no run of v10, seed 3, is kept"):
        command(parser.parse_args(["--again", "v10", "3"]), ARMS, tmp_path / "runs.jsonl", smollm2_figures, train)


def test_a_quantity_transfers_if_its_factor_of_one_half_predicts_the_other_half(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With made-up cells whose loss is twice their TV per completion, while TV per token shrinks with the length."""
    done: dict[Key, EvidenceRow] = {}
    for place, setting in enumerate(SETTINGS):
        drift = 0.01 + 0.001 * ((7 * place) % 31) + 0.002 * setting.v
        for seed, one, tv in product((1, 2), (setting.fresh, setting), (0.0, drift)):
            if (one.v == 1) == (tv == 0.0):
                cell = row(one.arm, one.rate, seed, 0.8 - 2 * tv)
                cell["by_cycle"] = {"drift_tv_sequence": (tv, tv), "drift_tv_token": (tv / one.digits, tv / one.digits)}
                cell["by_cycle"] |= {"ess": (1 - tv, 1 - tv), "cosine": (0.9, 0.9)}
                done[one.arm, one.rate, seed] = cell
    settings = of_sums(done, (1, 2))
    assert len(settings) == len(SETTINGS) and sum(one.fitted for one in settings) == len(SETTINGS) / 2
    names = {"tv-sequence": CANDIDATES["tv-sequence"], "tv-token": CANDIDATES["tv-token"]}
    monkeypatch.setattr("lab.learning.evidence.transfer.CANDIDATES", names)
    by_id = {one.id: one for one in transfer_figures(settings)}
    assert by_id["transfer.3.tv-sequence-final"].measured == "1.00 [1.00, 1.00]"
    assert by_id["transfer.3.tv-sequence-final"].holds
    assert "chosen by the fitted half; loss = 2 · tv-sequence" in by_id["transfer.3.tv-sequence-final"].note
    assert not by_id["transfer.3.tv-token-final"].holds


def test_pass_rates_at_equal_kl_lie_where_the_kl_is_reached_first() -> None:
    one, other = row("x", 1e-3, 1, 0.0), row("y", 1e-3, 1, 0.0)
    one["curve"], one["kl"] = [0.2, 0.4, 0.6, 0.8], [0.0, 0.2, 0.1, 0.4]
    other["curve"], other["kl"] = [0.2, 0.3, 0.4, 0.5], [0.0, 0.1, 0.3, 0.2]
    assert at_equal_kl(one, other) == pytest.approx((0.6 + 0.2 * 0.1 / 0.2) - 0.4)
