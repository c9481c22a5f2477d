"""The driver: the only offbeat code that runs inside the sandbox. It starts the program.

A bare interpreter (`python -I -S`) receives it compiled; it imports little, because every start pays for an import. It
reads the program from standard input, reports that it is ready, and either runs the program as a script, whose standard
input is a file, or calls one of its functions with arguments that arrive one call at a time. Once the program has
started, the parent trusts nothing that comes from here.

Answers travel as JSON lines. Every JSON object on the wire is a tag, so Python's types survive: tuple, set, dict,
bytes and large int become {"tuple": [...]}, {"set": [...]}, {"dict": [[key, value], ...]}, {"bytes": hex} and
{"int": hex}. A subclass of these, such as Counter or a namedtuple, travels as its base; `dict.keys()` and
`dict.items()` travel as sets, which they equal. With any other type the call fails.
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
_SCALARS: "tuple[type, ...]" = (type(None), bool, int, float, str, bytes)
_TAGS: "dict[type, str]" = {list: "", tuple: "tuple", dict: "dict", set: "set", frozenset: "set"}
_TAGS |= {type({}.keys()): "set", type({}.items()): "set"}


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
    # The methods of the base, not of the value: a subclass can have its own behavior, and a false __class__.
    for base in _SCALARS:
        if issubclass(type(value), base):
            return _encode_scalar(base, value)
    for base, tag in _TAGS.items():
        if issubclass(type(value), base):
            if base is dict:
                pairs = dict.items(value)  # type: ignore[arg-type,var-annotated]
                encoded = [f"[{encode(k, _deeper(depth))},{encode(v, _deeper(depth))}]" for k, v in pairs]
            else:
                encoded = [encode(item, _deeper(depth)) for item in base.__iter__(value)]  # type: ignore[attr-defined]
            return f'{{"{tag}":[{",".join(encoded)}]}}' if tag else f"[{','.join(encoded)}]"
    raise TypeError(f"the answer has type {type(value).__name__}; it must be a plain number, string or container")


def _deeper(depth: int) -> int:
    if depth == _MAX_DEPTH:
        raise ValueError(f"the answer is nested deeper than {_MAX_DEPTH} levels")
    return depth + 1


def _encode_scalar(base: type, value: object) -> str:
    if value is None:
        return "null"
    if base is bool:
        return "true" if value else "false"
    if base is int:
        number = int.__index__(value)  # type: ignore[arg-type]
        return repr(number) if -_LARGEST_INT < number < _LARGEST_INT else f'{{"int":"{number:x}"}}'
    if base is str:
        return encode_basestring_ascii(value)  # type: ignore[arg-type]
    if base is bytes:
        return f'{{"bytes":"{bytes.hex(value)}"}}'  # type: ignore[arg-type]
    text = float.__repr__(value)
    return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(text, text)


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


def _put_stdin(file: int) -> None:
    """Make a file the standard input. Python's own `sys.stdin` knows the pipe, which cannot seek."""
    os.dup2(file, 0)
    os.close(file)
    os.lseek(0, 0, os.SEEK_SET)
    encoding, errors = sys.stdin.encoding, sys.stdin.errors
    stdin = open(0, encoding=encoding, errors=errors, closefd=False)  # noqa: SIM115  # as open as the process
    sys.stdin = sys.__stdin__ = stdin  # type: ignore[misc]


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
    program, function, stdin, limits = marshal.loads(_read_message(0))
    if function is None:
        _put_stdin(stdin)
    else:
        os.close(stdin)
    _set_limits(limits)
    os.write(1, READY)
    if function is None:
        _load(program, "__main__")
    else:
        _answer_calls(program, function)


if __name__ == "__main__":
    main()
