"""Log, sampler and ledger against a simple model."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.fixtures.experience_machine import ExperienceMachine


def run(examples: int, steps: int) -> None:
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large]
    limits = settings(max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=quiet)
    run_state_machine_as_test(ExperienceMachine, settings=limits)


def test_every_group_is_accounted_for_after_every_step_of_a_short_run():
    before = ExperienceMachine.steps
    run(examples=3, steps=40)
    assert ExperienceMachine.steps - before >= 60


@pytest.mark.engine
def test_every_group_is_accounted_for_after_every_step_of_a_long_run():
    before = ExperienceMachine.steps
    run(examples=20, steps=100)
    assert ExperienceMachine.steps - before >= 1000
