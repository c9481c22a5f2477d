"""The driver: the only code of ours that runs inside the sandbox, in front of the program.

A bare interpreter (`python -I -S`) receives it compiled, so it imports nothing that each start would pay for. It takes
the program from standard input, says that it is up, and either runs it as a script or calls one of its functions
on arguments that arrive one call at a time. Nothing here is trusted by the parent once the program has started.

Answers travel as JSON lines. Every JSON object on the wire is a tag, so Python's own types survive: tuple, set, dict,
bytes and large int become {"tuple": [...]}, {"set": [...]}, {"dict": [[key, value], ...]}, {"bytes": hex} and
{"int": hex}. Other types, subclasses of these among them, are not answers: the call fails.
"""

import builtins
import marshal
import os
import resource
import sys
from _json import encode_basestring_ascii  # json itself brings re along, milliseconds at each start

READY = b"ready\n"
_DEEPEST = 64
_LARGEST_INT = 1 << 63


def encode(value: object, depth: int = 0) -> str:
    """A plain value as one line of JSON.

    >>> encode([1, 2.0, (None, "é")])
    '[1,2.0,{"tuple":[null,"\\\\u00e9"]}]'
    >>> encode({1: {2}})
    '{"dict":[[1,{"set":[2]}]]}'
    >>> encode(object())
    Traceback (most recent call last):
    ...
    TypeError: a value of type object is not an answer; plain numbers, strings and containers are
    """
    # Types are compared, not asked for with isinstance: a subclass brings behaviour of its own.
    if type(value) is list or type(value) is tuple or type(value) is set or type(value) is frozenset:
        tag = {list: "", tuple: "tuple", set: "set", frozenset: "set"}[type(value)]
        items = f"[{','.join([encode(item, _deeper(depth)) for item in value])}]"
        return f'{{"{tag}":{items}}}' if tag else items
    if type(value) is dict:
        pairs = [f"[{encode(k, _deeper(depth))},{encode(v, _deeper(depth))}]" for k, v in value.items()]
        return f'{{"dict":[{",".join(pairs)}]}}'
    return _encode_scalar(value)


def _deeper(depth: int) -> int:
    if depth == _DEEPEST:
        raise ValueError(f"an answer nested deeper than {_DEEPEST} levels")
    return depth + 1


def _encode_scalar(value: object) -> str:
    if value is None:
        return "null"
    if type(value) is bool:
        return "true" if value else "false"
    if type(value) is int:
        return repr(value) if -_LARGEST_INT < value < _LARGEST_INT else f'{{"int":"{value:x}"}}'
    if type(value) is float:
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(repr(value), repr(value))
    if type(value) is str:
        return encode_basestring_ascii(value)
    if type(value) is bytes:
        return f'{{"bytes":"{value.hex()}"}}'
    raise TypeError(
        f"a value of type {type(value).__name__} is not an answer; plain numbers, strings and containers are"
    )


def frame(message: object) -> bytes:
    """A message of the parent to the driver: its length, then the values as `marshal` writes them.

    >>> frame(1)
    b'\\x05\\x00\\x00\\x00i\\x01\\x00\\x00\\x00'
    """
    data = marshal.dumps(message, 2)  # type: ignore[arg-type]  # it refuses what it cannot write
    return len(data).to_bytes(4, "little") + data


def compiled() -> bytes:
    """This file as a message, for an interpreter of the same version."""
    with open(__file__, encoding="utf-8") as source:
        return frame(compile(source.read(), "driver.py", "exec", optimize=2))


def _message(channel: int) -> bytes:
    return _exactly(channel, int.from_bytes(_exactly(channel, 4), "little"))


def _exactly(channel: int, size: int) -> bytes:
    """No byte more than asked for: what follows may be the program's own standard input."""
    read = bytearray()
    while len(read) < size:
        arrived = os.read(channel, size - len(read))
        if not arrived:
            os._exit(0)  # the parent has heard enough
        read += arrived
    return bytes(read)


def _confine(limits: "dict[str, int]") -> None:
    """Limits that a process sets for itself, and that nothing after it can raise again."""
    for name, value in limits.items():
        number = getattr(resource, name)
        _, hard = resource.getrlimit(number)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))


def _load(program: str, name: str) -> "dict[str, object]":
    module = type(sys)(name)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    exec(compile(program, "program.py", "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


def _answer_calls(program: str, function: str) -> None:
    """Standard input and output are the line to the parent: an honest program that prints must not disturb it."""
    requests, answers = os.dup(0), os.dup(1)
    nowhere = os.open("/dev/null", os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    called = _load(program, "program")[function]
    while True:
        # The parent's own values; nothing that a program wrote is ever unmarshalled.
        arguments, keywords = marshal.loads(_message(requests))
        line = encode(called(*arguments, **keywords)).encode() + b"\n"  # type: ignore[operator]
        while line:
            line = line[os.write(answers, line) :]


def main() -> None:
    """Take the order, say that the sandbox stands, and go."""
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # -S left them out, and scripts use them
    program, function, limits = marshal.loads(_message(0))
    _confine(limits)
    os.write(1, READY)
    if function is None:
        _load(program, "__main__")
    else:
        _answer_calls(program, function)


if __name__ == "__main__":
    main()
