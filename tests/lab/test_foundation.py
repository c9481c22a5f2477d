"""A row of the clean clone that falls short says why, because nobody may edit it afterwards."""

from subprocess import CompletedProcess

from lab.bench.foundation import why_it_failed


def test_failed_tests_are_named_once_each() -> None:
    output = (
        "FAILED tests/test_api.py::test_one - OSError: disk\nERROR tests/b.py::two\nFAILED tests/test_api.py::test_one"
    )
    assert (
        why_it_failed(CompletedProcess("", 1, output, "")) == "; failed: tests/test_api.py::test_one, tests/b.py::two"
    )


def test_without_tests_the_last_line_says_it() -> None:
    assert why_it_failed(CompletedProcess("", 1, "installing\n", "no space left\n")) == "; ended with 1: no space left"
    assert why_it_failed(CompletedProcess("", 0, "FAILED in a log, and then passed", "")) == ""
