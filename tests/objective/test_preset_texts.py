"""What the texts of presets say beyond their mathematics."""

from offbeat.objective.presets import PRESETS


def test_that_a_wide_clip_learns_faster_is_quoted_as_a_report_and_not_as_a_fact() -> None:
    for name, preset in PRESETS.items():
        if "learns faster" in preset.use:
            assert "P1 reports that a wider clip" in preset.use, name
            assert "in our own runs it fails at v = 5" in preset.use, name


def test_red_weight_is_reported_up_to_lag_20_and_asymre_for_data_of_any_age() -> None:
    assert PRESETS["red-weight"].reported_lag == 20 and PRESETS["asymre"].reported_lag == float("inf")
