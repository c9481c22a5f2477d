"""Is what a file holds the object that was given? Asked before a run begins, of the file in a new process.

    the session  ── describe ──► code, defaults, attributes, closures, globals ─┐
                 ── a fork ────► rewards of sample answers ─────────────────────┤ the same, or the first difference
    a process    ── describe, score ──► the same of the file ───────────────────┘

Of the session and of your own modules everything that the code can read is described, of installed packages functions,
classes and constants. Random generators, and what cannot be copied, such as a lock, are described by type. Rewards are
compared where two calls here agree: a function that is random, or asks a judge, is compared by its code alone.
"""

import builtins
import dis
import hashlib
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import IO, Any, Final

from offbeat.imports import is_installed, load_file, own_root
from offbeat.tasks.rewards import Answers, Reward, examine

Node = str | dict[str, Any]
"""A value as text, or its parts by name; the part "" says what it is."""
Samples = Sequence[Mapping[str, Any]]
CALL_SECONDS: Final = 5.0
LOAD_SECONDS: Final = 300.0
_READS: Final = {"LOAD_NAME", "LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"}
_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes, range, slice, type(...), type(NotImplemented))
_CONTENT: Final[tuple[Any, ...]] = (dict, list, tuple, set, frozenset, str, bytes, int, float)
_PARTS: Final[Mapping[type, str]] = {
    CodeType: "co_name co_consts co_names co_argcount co_posonlyargcount co_kwonlyargcount co_varnames co_freevars "
    "co_cellvars co_flags",
    FunctionType: "__code__ __defaults__ __kwdefaults__ __closure__ __dict__ __name__",
    CellType: "cell_contents",
    MethodType: "__self__ __func__",
    classmethod: "__func__",
    staticmethod: "__func__",
    property: "fget fset fdel",
}


def read_names(code: CodeType, *, attributes: bool = False) -> set[str]:
    """Return the global names that code and the functions in it use, or these and the names of attributes.

    >>> sorted(read_names(compile("def f(x=LIMIT): return g(x.y)", "", "exec")))
    ['LIMIT', 'g']
    """
    steps = list(dis.get_instructions(code))
    found = {one.argval for one in steps if one.opname in _READS} - {"__annotations__"}
    found -= {one.argval for one in steps if one.opname == "STORE_NAME"}
    found -= {"__name__"} if "__module__" in code.co_names else set()  # the body of a class reads it
    found |= {*code.co_names} if attributes else set()
    return found.union(*(read_names(one, attributes=attributes) for one in code.co_consts if isinstance(one, CodeType)))


def describe(value: object, names: frozenset[str] = frozenset(), met: dict[object, Any] | None = None) -> Node:
    """Describe a value. `names` are the attributes that the code reads, which is what counts of a module."""
    met = {} if met is None else met
    kept = isinstance(value, ModuleType | FunctionType | list | dict | set | CellType) or _is_own(value)
    if kept and not _is_recursive(value):
        key = id(value), names if isinstance(value, ModuleType) else None
        if key in met:
            return f"object {met[key][0]} again"
        met[key] = len(met), value  # kept, so that no other object gets its id
    what, parts = f"a {type(value).__qualname__}", dict[str, object]()
    with suppress(Exception), warnings.catch_warnings(action="ignore"):  # the boundary to any class
        what, parts = _parts(value, names)
    if isinstance(value, FunctionType):
        names = frozenset(read_names(value.__code__, attributes=True))
    return {"": what} | {name: describe(part, names, met) for name, part in parts.items()} if parts else what


def _steps(code: CodeType) -> str:
    """Return what code does, step by step, in one form for what compiles to two.

    The compiler calls a method of a name in another way if the module imports that name, also where it is local.
    """
    skipped, byte_code = ("EXTENDED_ARG", "NOP", "PUSH_NULL"), dis.Bytecode(code)
    steps = [one for one in byte_code if one.opname not in skipped]
    places = [one.offset for one in steps]
    text = []
    for one in steps:
        jumps = one.opcode in dis.hasjrel or one.opcode in dis.hasjabs
        named = one.opname in ("LOAD_ATTR", "LOAD_METHOD")
        target = bisect_left(places, one.argval) if jumps else one.argval if named else one.arg
        text.append(f"{'LOAD_ATTR' if named else one.opname} {target}")
    for each in byte_code.exception_entries:  # type: ignore[attr-defined]  # not in typeshed
        start, end, target = (bisect_left(places, one) for one in (each.start, each.end, each.target))
        text.append(f"except {start} {end} {target} {each.depth} {each.lasti}")
    return "\n".join(text)


def _parts(value: Any, names: frozenset[str]) -> tuple[str, dict[str, object]]:
    """Return what a value is, and its parts by name."""
    kind, what = type(value), f"a {type(value).__name__}"
    if kind in _PLAIN:
        text = repr(value)
        return (text if len(text) < 100 else text[:40] + hashlib.sha256(text.encode("utf8", "replace")).hexdigest()), {}
    if kind in (dict, MappingProxyType):
        return what, {f"[{json.dumps(describe(key))}]": one for key, one in value.items()}
    if kind in (list, tuple, set, frozenset):
        parts = sorted(json.dumps(describe(one)) for one in value) if kind in (set, frozenset) else value
        return what, {f"[{i}]": one for i, one in enumerate(parts)}
    if isinstance(value, ModuleType):
        own, found = own_root(value), {f".{name}": getattr(value, name, None) for name in sorted(names)}
        kinds = (*_PLAIN[1:], FunctionType, BuiltinFunctionType, type, ModuleType)  # the rest is a library's state
        return value.__name__, {name: one for name, one in found.items() if own or isinstance(one, kinds)}
    if isinstance(value, type):
        held = {f".{key}": vars(value)[key] for key in sorted(vars(value))}
        if not _is_own(value):
            what = f"{value.__module__}.{value.__qualname__}"
            return what, {key: one for key, one in held.items() if type(one) is FunctionType and _is_own(one)}
        held = {key: one for key, one in held.items() if key[:3] != ".__" or callable(one)}
        return f"class {value.__name__}", {".__bases__": value.__bases__, ".__class__": kind, **held}
    if kind not in _PARTS:
        return _own_parts(value) if _is_own(value) else _reduced(value)
    found = {f".{name}": getattr(value, name) for name in _PARTS[kind].split()}
    found |= {".steps": _steps(value)} if kind is CodeType else {}
    if kind is FunctionType and not _is_own(value):  # libraries note things on functions of others
        what = f"{Path(value.__code__.co_filename).name}:{value.__code__.co_qualname}"
        noted = {f".{key}": one for key, one in vars(value).items() if key in {*names, "__wrapped__"}}
        return what, noted | ({".__closure__": value.__closure__} if value.__closure__ else {})
    if kind is FunctionType:
        everywhere = {**vars(builtins), **value.__globals__}
        found |= {f" → {name}": everywhere.get(name, ...) for name in sorted(read_names(value.__code__))}
    return what, found


def _is_recursive(cell: object) -> bool:
    """Return True for the variable of a function that calls itself by it. A file gives each user its own variable."""
    with suppress(ValueError):  # no value
        held = cell.cell_contents if isinstance(cell, CellType) else None
        return isinstance(held, FunctionType) and held.__name__ in held.__code__.co_freevars
    return False


def _own_parts(value: Any) -> tuple[str, dict[str, object]]:
    state: Any = object.__getstate__(value)
    parts = [part or {} for part in (state if isinstance(state, tuple) else [state])]  # attributes, and slots
    content = [base(value) for base in _CONTENT if isinstance(value, base)]
    held = {f".{key}": part[key] for part in parts for key in sorted(part)}
    return "an object", {".__class__": type(value), " content": content, **held}


def _reduced(value: Any) -> tuple[str, dict[str, object]]:
    """Take an object of an installed class apart, as copying would."""
    what = f"{type(value).__module__}.{type(value).__qualname__}"
    if what.startswith(("random.", "numpy.random.")):
        return what, {}
    reduced = value.__reduce_ex__(2)
    if isinstance(reduced, str):
        wrapped = {key: getattr(value, key) for key in ("__wrapped__", "cache_parameters") if hasattr(value, key)}
        return what if wrapped else f"{value.__module__}.{reduced}", wrapped
    made, arguments, state, *items = (*reduced, None, None, None)[:5]
    if isinstance(state, dict):  # of a client much differs between processes; its settings do not
        state = {key: one for key, one in state.items() if key[0] != "_" and type(one) in (bool, int, str)}
    return what, {" made by": made, " from": arguments, " state": state, " items": [[*(one or ())] for one in items]}


def _is_own(value: Any) -> bool:
    """Return True for what is defined, or whose class is, in the session, in the file or in a module of your own."""
    if isinstance(value, FunctionType):
        return not is_installed(value.__code__.co_filename)
    home = sys.modules.get((value if isinstance(value, type) else type(value)).__module__)
    return home is None or home.__name__ in ("__main__", "__mp_main__") or own_root(home) is not None


def differences(live: Node | None, written: Node | None, path: str) -> Iterator[str]:
    """Yield what differs between two descriptions, in words.

    >>> list(differences({"": "a dict", ".LIMIT": "3"}, {"": "a dict", ".LIMIT": "4"}, "correct"))
    ['correct.LIMIT is 3 here and 4 there']
    """
    if live and written and dict in (type(live), type(written)):
        live, written = ({"": one} if isinstance(one, str) else one for one in (live, written))
        for key in dict.fromkeys([*live, *written]):
            yield from differences(live.get(key), written.get(key), path + key)
        if live.keys() == written.keys() and [*live] != [*written]:
            yield f"{path} has another order there"
    elif live != written:
        here, there = ((one if isinstance(one, str) else one[""] if one else "missing") for one in (live, written))
        yield f"{path} is {here:.80} here and {there:.80} there"


def first_difference(path: Path, name: str, live: object, samples: Samples = ()) -> str:
    """Return in what `live`, a part or a list of rewards, differs from what a file calls `name`; empty if in nothing.

    Rewards also score samples, `Answers` as dictionaries, for a few seconds at most.
    """
    command = [sys.executable, "-m", "offbeat.tasks.same_reward", str(path), name]
    with tempfile.TemporaryFile("w+") as here, warnings.catch_warnings(action="ignore"):  # a fork has no other threads
        fork = multiprocessing.get_context("fork").Process(target=_score, args=(live, samples, here))
        fork.start()
        try:
            given = {"input": json.dumps(samples), "capture_output": True, "text": True, "timeout": LOAD_SECONDS}
            file = subprocess.run(command, **given)  # type: ignore[call-overload]
            fork.join(CALL_SECONDS)
        except subprocess.TimeoutExpired:
            return f"it does not load within {LOAD_SECONDS:.0f} s"
        finally:
            fork.kill()
            fork.join()
        here.seek(0)
        ours, theirs = _lines(here.read()), _lines(file.stdout)
    if "error" in theirs or not theirs:
        return f"it does not load there: {theirs.get('error', file.stderr[-200:])}"
    for label, node in _described(live).items():
        for found in differences(node, theirs.get(label), label):
            return found
    for name, each in ours.items():
        for sample, now, then in zip(samples, each, theirs.get(name, []), strict=False):
            if any(one not in (None, other) for one, other in zip(now, then, strict=True)):  # None: it may need threads
                return f"{name} for {sample['texts']} is {now} here and {then} there"
    return ""


def _lines(text: str) -> dict[str, Any]:
    return {key: one for line in text.split("\n")[:-1] for key, one in json.loads(line).items()}


def _described(found: object) -> dict[str, Node]:
    rewards = [one for one in found if isinstance(one, Reward)] if isinstance(found, list) else []
    setups = {f"the setup of {one.name}": one.setup for one in rewards if one.setup}
    parts: dict[str, object] = {**{one.name: one.function for one in rewards}, **setups} or {"it": found}
    return {label: describe(part) for label, part in parts.items()}


def _score(found: object, samples: Samples, out: IO[str]) -> None:
    """Write what each reward says of the samples, if it says so twice. What needs a setup may load a model: nothing."""
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # until this process ends
    for reward in [one for one in found if not one.setup] if isinstance(found, list) else []:
        with suppress(Exception):  # what would end a run
            said = [[examine([reward], (-math.inf, math.inf), Answers(**one)) for one in samples] for _ in range(2)]
            rewards = [[[getattr(one, "reward", None) for one in each] for each in twice] for twice in said]
            if rewards[0] == rewards[1]:
                print(json.dumps({f"scores of {reward.name}": rewards[0]}), file=out, flush=True)


def main() -> None:
    """Describe what the file of the first argument calls by the second, then score the samples of standard input."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what your file prints
    try:
        found = getattr(load_file(Path(sys.argv[1])), sys.argv[2])
    except BaseException as error:  # your file
        print(json.dumps({"error": f"{type(error).__name__}: {error}"[:500]}), file=out, flush=True)
        return
    print(json.dumps(_described(found)), file=out, flush=True)
    signal.setitimer(signal.ITIMER_REAL, CALL_SECONDS)  # ends this process
    _score(found, json.load(sys.stdin), out)


if __name__ == "__main__":
    main()
