"""The driver: the only offbeat code that runs inside the sandbox. It starts the program.

A bare interpreter (`python -I -S`) receives it compiled; it imports little, because every start pays for an import. It
reads the program from standard input, reports that it is ready, and either runs the program as a script or calls one
of its functions with arguments that arrive one call at a time. Once the program has started, the parent trusts nothing
that comes from here.

Answers travel as JSON lines. Every JSON object on the wire is a tag, so Python's types survive: tuple, set, dict,
bytes and large int become {"tuple": [...]}, {"set": [...]}, {"dict": [[key, value], ...]}, {"bytes": hex} and
{"int": hex}. With any other type, also a subclass of these, the call fails.
"""

import builtins
import marshal
import os
import resource
import sys
from _json import encode_basestring_ascii  # json itself imports re, which costs milliseconds at each start

READY = b"ready\n"
_MAX_DEPTH = 64
_LARGEST_INT = 1 << 63


def encode(value: object, depth: int = 0) -> str:
    """Encode a plain value as one line of JSON.

    >>> encode([1, 2.0, (None, "é")])
    '[1,2.0,{"tuple":[null,"\\\\u00e9"]}]'
    >>> encode({1: {2}})
    '{"dict":[[1,{"set":[2]}]]}'
    >>> encode(object())
    Traceback (most recent call last):
    ...
    TypeError: the answer has type object; it must be a plain number, string or container
    """
    # Exact types, not isinstance: a subclass can have its own behavior.
    if type(value) is list or type(value) is tuple or type(value) is set or type(value) is frozenset:
        tag = {list: "", tuple: "tuple", set: "set", frozenset: "set"}[type(value)]
        items = f"[{','.join([encode(item, _deeper(depth)) for item in value])}]"
        return f'{{"{tag}":{items}}}' if tag else items
    if type(value) is dict:
        pairs = [f"[{encode(k, _deeper(depth))},{encode(v, _deeper(depth))}]" for k, v in value.items()]
        return f'{{"dict":[{",".join(pairs)}]}}'
    return _encode_scalar(value)


def _deeper(depth: int) -> int:
    if depth == _MAX_DEPTH:
        raise ValueError(f"the answer is nested deeper than {_MAX_DEPTH} levels")
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
    raise TypeError(f"the answer has type {type(value).__name__}; it must be a plain number, string or container")


def frame(message: object) -> bytes:
    """Encode a message from the parent to the driver: its length, then the values in `marshal` format.

    >>> frame(1)
    b'\\x05\\x00\\x00\\x00i\\x01\\x00\\x00\\x00'
    """
    data = marshal.dumps(message, 2)  # type: ignore[arg-type]  # it raises on what it cannot write
    return len(data).to_bytes(4, "little") + data


def compiled() -> bytes:
    """Return this file, compiled for an interpreter of the same version, as a message."""
    with open(__file__, encoding="utf-8") as source:
        return frame(compile(source.read(), "driver.py", "exec", optimize=2))


def _read_message(channel: int) -> bytes:
    return _read_exactly(channel, int.from_bytes(_read_exactly(channel, 4), "little"))


def _read_exactly(channel: int, size: int) -> bytes:
    """Read so many bytes and not one more: the next may belong to the standard input of the program."""
    read = bytearray()
    while len(read) < size:
        arrived = os.read(channel, size - len(read))
        if not arrived:
            os._exit(0)  # the parent has closed the pipe
        read += arrived
    return bytes(read)


def _set_limits(limits: "dict[str, int]") -> None:
    """Set resource limits for this process; nothing that runs after it can raise them again."""
    for name, value in limits.items():
        number = getattr(resource, name)
        _, hard = resource.getrlimit(number)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))


def _load(program: str, name: str) -> "dict[str, object]":
    module = type(sys)(name)
    sys.modules[name] = module  # dataclasses and pickle look up their module
    exec(compile(program, "program.py", "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


def _answer_calls(program: str, function: str) -> None:
    """Call the function for each request. Standard input and output serve for that, so the program gets /dev/null."""
    requests, answers = os.dup(0), os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    called = _load(program, "program")[function]
    while True:
        # These bytes come from the parent; nothing that a program wrote is ever unmarshalled.
        arguments, keywords = marshal.loads(_read_message(requests))
        line = encode(called(*arguments, **keywords)).encode() + b"\n"  # type: ignore[operator]
        while line:
            line = line[os.write(answers, line) :]


def main() -> None:
    """Read the program and its limits, report that the sandbox is ready, and run the program."""
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # -S leaves them out, and scripts use them
    program, function, limits = marshal.loads(_read_message(0))
    _set_limits(limits)
    os.write(1, READY)
    if function is None:
        _load(program, "__main__")
    else:
        _answer_calls(program, function)


if __name__ == "__main__":
    main()
