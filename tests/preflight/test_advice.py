"""What `offbeat check` advises is not refused by the next check, and what it refuses cannot run."""

from offbeat.objective.presets import PRESETS
from offbeat.objective.spec import Need
from offbeat.preflight.checks import LogContents
from tests.preflight.advice import NO_LOG, Data, advice, allowed, combinations, follow, judge, needs_logprobs

REWARDS_ALONE = Data("none", False, True, "log", LogContents(4, 0, 4))


def test_the_changes_that_a_sentence_names_are_found() -> None:
    sentence = "x; set sync.every = 1, or choose one of grpo, opmd, or remove sync.by_cost, or set run.mode = 'offline'"
    assert [*advice(sentence)] == [
        ("sync.every", 1), ("run.mode", "offline"), ("objective.preset", "grpo"), ("objective.preset", "opmd"),
        ("sync.by_cost", None),
    ]  # fmt: skip


def test_the_gradient_changes_with_log_probs_exactly_where_a_preset_says_that_it_needs_them() -> None:
    declared = {name for name, preset in PRESETS.items() if Need.BEHAVIOR in preset.objective.needs}
    assert set(filter(needs_logprobs, PRESETS)) == declared


def test_nothing_is_refused_that_the_formula_allows_and_no_advice_is_circular() -> None:
    wrong, circular, judged_all = [], [], []
    for preset, mode, data, size, settings in combinations(list(PRESETS), [REWARDS_ALONE]):
        if settings["optimizer"]["learning_rate"] != 5e-6 or size != 1.35e8:
            continue
        judged = judge(settings, data, size)
        judged_all.append(judged.level)
        contradicts = any(one.startswith(("sync.by_cost", "sync.drift_budget")) for one in judged.refused)
        if bool(judged.refused) == allowed(preset, mode, data) and not contradicts:
            wrong.append((preset, mode, judged.refused))
        for sentence in (*judged.refused, *filter(None, [judged.loses])):
            circular += follow(settings, data, size, sentence)
    assert not wrong and not circular
    assert {"refused", "known to lose", "nobody has shown it", "nothing said"} == set(judged_all)


def test_an_objective_that_needs_log_probs_is_refused_on_rewards_alone_and_not_on_its_own_groups() -> None:
    asked = {"run": {"mode": "offline", "experience": "log"}, "sampler": {"mode": "offline"}}
    refused = judge({**asked, "objective": {"preset": "grpo"}}, REWARDS_ALONE, 1.35e8).refused
    assert "red-drop" in str(refused) and "reinforce" not in str(refused)
    assert judge({**asked, "objective": {"preset": "red-drop"}}, REWARDS_ALONE, 1.35e8).runs
    assert judge({"objective": {"preset": "grpo"}}, NO_LOG, 1.35e8).runs
