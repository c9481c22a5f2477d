"""Tests for programs: how they are written, and when an answer counts as the expected one.

A test is one of

    "assert area(3, 4) == 12"                                  a call and a literal, as Python writes them
    {"call": "area", "args": [3, 4], "result": 12}             the same in JSON; "kwargs" may be added
    {"stdin": "3 4\\n", "stdout": "12\\n"}                       the program as a script

Nothing in a test is executed outside the sandbox. An assertion with more than a call and a literal is an error.

Answers arrive in wire form (`sandbox/driver.py`) from a program that may lie about anything, so they are compared as
data:

- True and False equal only themselves, not 1 and 0. None equals None.
- Numbers compare by value: 3 equals 3.0. If the expected number is a float, a relative difference of 1e-6 passes, and
  if it is 0.0, an absolute one of 1e-9. NaN equals NaN.
- A tuple equals a list with the same items: JSON cannot tell them apart. A set equals a set and a dict equals a dict in
  any order; numbers in a set and in keys are exact.
- The output of scripts is compared line by line, without blanks at line ends and empty lines at the end.
"""

import ast
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from offbeat.sandbox import Arguments, SandboxLimits
from offbeat.sandbox.driver import encode
from offbeat.types import Json

RELATIVE: Final = 1e-6
ABSOLUTE: Final = 1e-9
_HEXADECIMAL: Final = re.compile(r"-?[0-9a-f]+")


@dataclass(frozen=True)
class Call:
    """A function, its arguments, and the result it should return, in wire form."""

    function: str
    arguments: Arguments
    expected: Json


@dataclass(frozen=True)
class Script:
    """What a program should print when it reads `stdin`."""

    stdin: str
    stdout: str


class BadTest(ValueError):
    """A test cannot be used. The data is wrong, not the program."""


def parse(tests: Json) -> list[Call | Script]:
    """Parse the tests of one example.

    >>> parse(["assert swap((1, 2)) == (2, 1)"])
    [Call(function='swap', arguments=(((1, 2),), {}), expected={'tuple': [2, 1]})]
    >>> parse(["assert open('/etc/passwd')"])
    Traceback (most recent call last):
    ...
    offbeat.tasks.code_tests.BadTest: "assert open('/etc/passwd')" is not of the form: assert f(literals) == literal
    """
    if not isinstance(tests, list) or not tests:
        raise BadTest(f"tests must be a list with at least one test, not {tests!r:.80}")
    return [_assertion(test) if isinstance(test, str) else _mapping(test) for test in tests]


def _assertion(text: str) -> Call:
    problem = BadTest(f"{text[:200]!r} is not of the form: assert f(literals) == literal")
    try:
        [statement] = ast.parse(text.strip()).body
    except (SyntaxError, ValueError):
        raise problem from None
    match statement:
        case ast.Assert(
            test=ast.Compare(
                left=ast.Call(func=ast.Name(id=function), args=args, keywords=keywords),
                ops=[ast.Eq()],
                comparators=[expected],
            )
        ) if all(keyword.arg for keyword in keywords):
            try:
                named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in keywords}
                arguments = tuple(ast.literal_eval(arg) for arg in args)
                return Call(function, (arguments, named), wire(ast.literal_eval(expected)))
            except (ValueError, TypeError):
                raise problem from None
    raise problem


def _mapping(test: Json) -> Call | Script:
    match test:
        case {"stdin": str(stdin), "stdout": str(stdout)}:
            size = len(stdout.encode(errors="replace"))
            if size > SandboxLimits.output_bytes:
                most = SandboxLimits.output_bytes
                raise BadTest(f"a script should print {size:,} bytes, and the sandbox stops it after {most:,}")
            return Script(stdin, stdout)
        case {"call": str(function), "args": list(args), "result": result, **rest}:
            named = rest.pop("kwargs", {})
            if isinstance(named, dict) and not rest:
                return Call(function, (tuple(args), named), wire(result))
    raise BadTest(f"{test!r:.200} is not a test; use {{'call', 'args', 'result'}} or {{'stdin', 'stdout'}}")


def wire(value: object) -> Json:
    """Convert a plain value to wire form, the form in which answers arrive.

    >>> wire({"a": (1, 2.5)})
    {'dict': [['a', {'tuple': [1, 2.5]}]]}
    """
    decoded: Json = json.loads(encode(value))
    return decoded


def same_output(expected: str, printed: bytes) -> bool:
    """Return True if a script printed the expected output.

    >>> same_output("1 2", b"1 2 \\n\\n"), same_output("1 2", b"1  2")
    (True, False)
    """
    return _lines(expected) == _lines(printed.decode(errors="replace"))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def same(expected: Json, answer: Json) -> bool:
    """Return True if an answer is the expected one; any other value, however malformed, is False.

    >>> same(wire([1, 2]), wire((1, 2.0))), same(wire(1), wire(True)), same(wire({1, 2}), wire([1, 2]))
    (True, False, False)
    >>> same(wire(1 / 3), wire(0.33333333)), same(wire(3), wire(2.9999999))
    (True, False)
    """
    try:
        return _same(expected, answer)
    except RecursionError:
        return False


def _same(expected: Json, answer: Json) -> bool:
    kind, wanted = _kind_and_content(expected)
    other_kind, given = _kind_and_content(answer)
    if kind != other_kind:
        return False
    if isinstance(wanted, list) and isinstance(given, list):
        if len(wanted) != len(given):
            return False
        if kind == "sequence":
            return all(_same(a, b) for a, b in zip(wanted, given, strict=True))
        if kind == "set":
            return {_key(item) for item in wanted} == {_key(item) for item in given}
        pairs, others = _by_key(wanted), _by_key(given)
        return pairs.keys() == others.keys() and all(_same(pairs[key], others[key]) for key in pairs)
    if isinstance(wanted, float) and isinstance(given, (int, float)):
        return _close(wanted, given)
    return wanted == given


def _close(wanted: float, given: float) -> bool:
    try:
        absolute = 0.0 if wanted else ABSOLUTE  # anywhere else, 0.0 would equal every small number
        return math.isclose(wanted, given, rel_tol=RELATIVE, abs_tol=absolute) or (wanted != wanted and given != given)
    except OverflowError:  # an integer larger than any float
        return False


def _kind_and_content(value: Json) -> tuple[str, Json]:
    """Return the kind of a value, and its content without the tag."""
    if isinstance(value, Mapping):
        return _untag(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return "number", value
    return ("sequence" if isinstance(value, list) else type(value).__name__), value


def _untag(value: Mapping[str, Json]) -> tuple[str, Json]:
    match list(value.items()):
        case [("tuple", list(items))]:
            return "sequence", items
        case [("set", list(items))]:
            return "set", items
        case [("dict", list(items))] if all(isinstance(pair, list) and len(pair) == 2 for pair in items):
            return "dict", items
        case [("bytes", str(data))]:
            return "bytes", data
        case [("int", str(digits))] if _HEXADECIMAL.fullmatch(digits):
            return "number", int(digits, 16)
    return "malformed", None  # no expected value has this kind


def _by_key(pairs: list[Json]) -> dict[str, Json]:
    return {_key(pair[0]): pair[1] for pair in pairs if isinstance(pair, list)}


def _key(value: Json) -> str:
    """Return a string that is the same for two values exactly if they are equal.

    A string, because Python randomizes string hashes: with numbers, a program could make every element collide.
    """
    kind, content = _kind_and_content(value)
    if isinstance(content, list):
        items = [_key(item) for item in content]
        return f"{kind}[{','.join(items if kind == 'sequence' else sorted(items))}]"
    if isinstance(content, float) and content.is_integer():
        content = int(content)
    return f"{kind}:{content:x}" if isinstance(content, int) else f"{kind}:{json.dumps(content)}"
