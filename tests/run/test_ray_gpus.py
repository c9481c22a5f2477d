"""A run on a Ray cluster without the GPUs that it needs ends soon, with a sentence that names them."""

import pytest

from tests.run.missing_gpus import LIMIT, WORDS, in_own_process

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("case", WORDS)
def test_missing_gpus_are_named_before_the_deadline(case: str) -> None:
    seconds, message = in_own_process(case)
    if case == "declared" and message.startswith("waited"):  # a busy machine did not even start a process in that time
        seconds, message = in_own_process(case)
    assert all(word in message for word in WORDS[case]), message
    assert seconds <= LIMIT
