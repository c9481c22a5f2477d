"""What looks like a secret is hidden in the text of an error, and nothing else is."""

import time

import pytest

from offbeat.secrecy import hide_secrets

TEXTS = [
    "{'Authorization': 'Bearer sk-c0ffee0123456789abcd'}",
    "Authorization: Bearer c0ffee0123456789abcd is not valid",
    "headers: {'x-api-key': 'c0ffee0123456789abcd', 'accept': '*/*'}",
    "no answer from judge(api_key=c0ffee0123456789abcd)",
    "api_key = 'c0ffee0123456789abcd'",
    "401 Client Error: Unauthorized for url: https://api.example.com/v1/judge?n=1&key=c0ffee0123456789abcd",
    "Incorrect API key provided: sk-proj-c0ffee0123456789abcd. See the list of keys",
    "could not connect to postgresql://me:c0ffee0123@db.example.com/scores",
    "login failed with password='the c0ffee is cold'",
    "PASSWORD=c0ffee01",
    "-----BEGIN PRIVATE KEY-----\nc0ffee\nc0ffee\n-----END PRIVATE KEY-----",
    "the environment has not-to-be-c0ffee",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_secret_in_the_text_of_an_error_is_hidden(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_JUDGE_TOKEN", "not-to-be-c0ffee")
    hidden = hide_secrets(text)
    assert "c0ffee" not in hidden and "***" in hidden
    assert hide_secrets(hidden) == hidden


@pytest.mark.parametrize(
    "text",
    [
        "KeyError: 'answer'",
        "invalid literal for int() with base 10: 'forty-two'",
        "correct: IndexError: list index out of range (rewards.py, line 12)",
        "unexpected token: ')' (line 3); max_tokens = 256",
        "FileNotFoundError: [Errno 2] No such file or directory: '/data/run1/keys/table.json'",
        "401 Client Error: Unauthorized for url: https://api.example.com/v1/judge?n=1",
        "worker 3 answered 'Basic LinearAlgebra' at http://localhost:8000/v1",
        "trained 12, waiting 3, expired 0: 15 of 15",
    ],
)
def test_an_ordinary_error_is_shown_as_it_is(text: str) -> None:
    assert hide_secrets(text) == text


@pytest.mark.parametrize(
    "part", ["key ", "key_", "key:", "key=", "token='", "a", "a1", "Bearer a1", "://a:", "pwd=1", "-", "a-", "eyJ-."]
)
def test_a_hostile_text_takes_no_time(part: str) -> None:
    began = time.process_time()
    hide_secrets(part * (2000 // len(part)))
    assert time.process_time() - began < 0.5
