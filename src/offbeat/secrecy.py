"""What looks like a secret: refused in source that is written, hidden in the texts of errors that are kept."""

import os
import re
from typing import Final

SECRET_NAME: Final = re.compile(r"(?i)(key|token|passw(or)?d|passphrase|pgpass|_pwd?|^pw|secret|credential)s?\b")
_FORMATS: Final = (
    r"\b(?:sk-[\w-]{12}|hf_\w{16}|gh[pousr]_\w{16}|github_pat_\w|glpat-[\w-]{12}|AKIA[0-9A-Z]{12}|xox[abprs]-\d"
    r"|AIza[\w-]{30}|eyJ[\w-]{8,}\.[\w-]{8,}\.|hooks\.slack\.com/\w+/\w"
    r"|(?:Basic|Bearer) (?-i:(?=(?:[\w+/]*?(?:[a-z][A-Z]|\d[A-Za-z])){2})[\w+/]{11}))"
    r"|://[\w.%+-]*:[\w.%+!$&*~-]{5,}@|-----BEGIN [A-Z ]*PRIVATE KEY"
)
_IN_SOURCE: Final = re.compile(
    rf"{_FORMATS}|(\w*(?:passw(?:or)?d|pgpass|(passphrase))"
    r"|\b(?:\w*_)?pwd?(?=[^=\n]*[:=][^'\"\n]*['\"](?![/.~])[^\s'\"]*\d)"
    r"|\w*(?:key|token|secret|credential)s?(?=[^=\n]*[:=]\W*(?=\S{12})"
    r"[^\s'\"]*?(?:\d[^\s'\"]*?[a-z]|[a-z][^\s'\"]*?\d)))"
    r"['\"\]]*\s*(?::[^=\n]{1,20})?[:=]\s*\(?[rbu]*['\"](?:(?(2)[^'\"\n]|[^\s'\"])){6,}['\"]",
    re.IGNORECASE,
)
_WHOLE: Final = re.compile(rf"(?:{_FORMATS})(?:(?<=@)|(?<=KEY)(?s:.*)|[^\s'\"]*)", re.IGNORECASE)
_NAMED: Final = re.compile(
    r"(?<![\w-])([\w-]{0,40}?(?:(authorization|passw(?:or)?d|passphrase|pwd)|key|token|secret|credential|signature)s?"
    r"['\"]?\s?[:=]\s?['\"]?(?:(?:basic|bearer|token)\s)?)((?<=['\"])[^'\"\n]{6,}|[^\s'\"&,;]{6,})",
    re.IGNORECASE,
)
"""In the text of an error: a header, a part of a URL, a value without quotes. Quick, because an answer may write it."""


def find_secret(text: str) -> str:
    """Return the name of what looks like a secret, "a constant" if it has none; empty if nothing does.

    >>> find_secret("api_key = 'sk-0123456789abcdef'"), find_secret("limit = 20")
    ('api_key', '')
    """
    found = _IN_SOURCE.search(text)
    return next((name for name, value in _held() if value in text), (found[1] or "a constant") if found else "")


def hide_secrets(text: str) -> str:
    """Return the text of an error without what looks like a secret, and without those in environment variables.

    >>> hide_secrets("401 for url: https://api.example.com/v1?api_key=abc123def456&n=1")
    '401 for url: https://api.example.com/v1?api_key=***&n=1'
    """
    for _, value in _held():
        text = text.replace(value, "***")
    return _NAMED.sub(_hidden, _WHOLE.sub("***", text))


def _hidden(found: re.Match[str]) -> str:
    """Hide the value after a name. A key has digits and letters; other values after such a name are ordinary."""
    name, password, value = found.groups()
    is_key = len(value) >= 12 and re.fullmatch(r"(?=\D*\d)(?=[^a-z]*[a-z])\S*", value, re.IGNORECASE)
    return f"{name}***" if password or is_key else found[0]


def _held() -> list[tuple[str, str]]:
    """Return the environment variables that hold secrets, by their names."""
    return [(name, value) for name, value in os.environ.items() if SECRET_NAME.search(name) and value[7:]]
