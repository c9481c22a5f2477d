"""What a process can import: installed extras, functions by name, and the environment around an import.

- Extras: which modules are missing, and the command that installs them.
- References: a function as `module:name`, or `path/to/task.py:name` for a file that is not a module, so that another
  process can load it without unpickling: a function, or what a name at the top level of a module stands for,
  such as a lambda or an object with `__call__`. The keyword arguments of a `functools.partial` travel as JSON.
- Environment variables that are set for the length of a block, for libraries that read them when they start.
- The garbage collector, paused for the length of a block that imports large libraries.
"""

import ast
import gc
import importlib
import importlib.util
import json
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Final, cast
from urllib.parse import unquote, urlsplit

from offbeat.errors import OwnPartError, UnreachableFunction, first_line, suggest_nearest

if TYPE_CHECKING:
    from offbeat.types import Json  # imports numpy, which `offbeat --help` does not need

_FILE: Final = "file:"
_LOADING: Final = threading.RLock()
"""Held while a file runs, because its module is in `sys.modules` before it is complete."""
EXTRAS: Final = (
    dict.fromkeys(
        ["datasets", "huggingface_hub", "lance", "pyarrow", "safetensors", "tokenizers", "torch", "transformers"],
        "train",
    )
    | dict.fromkeys(["math_verify", "reasoning_gym", "sympy"], "math")
    | {name: name for name in ("ray", "tensorboard", "trackio", "vllm", "wandb")}
    | {"jinja2": "report", "peft": "lora"}
)
"""The extra that installs each optional module."""


def install_command(extra: str) -> str:
    """Return the shell command that installs an extra into the installation at hand.

    No package index has offbeat yet, so every command installs from a checkout, or from the wheel that is installed.
    """
    from importlib.metadata import PackageNotFoundError, distribution  # only messages need it

    try:
        origin = json.loads(distribution("offbeat").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        origin = {}
    return _install_from(origin, extra)


def _install_from(origin: "Mapping[str, Json]", extra: str) -> str:
    """Return the command for what pip wrote about where a package came from (PEP 610).

    >>> _install_from({"url": "file:///src/offbeat", "dir_info": {"editable": True}}, "math")
    "pip install -e '/src/offbeat[math]'"
    >>> _install_from({"url": "file:///tmp/offbeat-0.1.0-py3-none-any.whl", "archive_info": {}}, "math")
    "pip install 'offbeat[math] @ file:///tmp/offbeat-0.1.0-py3-none-any.whl'"
    >>> _install_from({"url": "file:///src/offbeat", "dir_info": {}}, "vllm")
    "pip install '/src/offbeat[vllm]' (without a GPU: scripts/install-cpu)"
    >>> _install_from({}, "math")
    "pip install '.[math]' in a checkout of offbeat"
    """
    url, folder = str(origin.get("url", "")), origin.get("dir_info")
    path = unquote(urlsplit(url).path)
    place = "." if Path(path) == Path.cwd() else path
    if isinstance(folder, Mapping):
        command = f"pip install {'-e ' if folder.get('editable') else ''}'{place}[{extra}]'"
    elif url:
        command = f"pip install 'offbeat[{extra}] @ {url}'"
    else:
        command = f"pip install '.[{extra}]' in a checkout of offbeat"
    return command + " (without a GPU: scripts/install-cpu)" * (extra == "vllm")


def missing_modules(modules: Iterable[str]) -> list[str]:
    """Return the modules that are not installed, without importing any.

    >>> missing_modules(["json", "jsonn"])
    ['jsonn']
    """
    return [module for module in modules if find_spec(module) is None]


def load_file(path: Path) -> ModuleType:
    """Load a Python file as a module named `file:<path>`. Loading it again returns the same module.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     file = Path(place, "mine.py")
    ...     _ = file.write_text("answer = 42")
    ...     load_file(file).answer
    42
    """
    with _LOADING:
        return _load(path, f"{_FILE}{path.resolve()}")


def _load(path: Path, name: str) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give the path of a Python file")
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file; its name should end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs, because dataclasses look up their module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def reference(function: Callable[..., object]) -> "dict[str, Json]":
    """Describe a function as JSON from which another process can load it with `resolve`.

    >>> from offbeat.tasks.arithmetic import correct
    >>> reference(correct)
    {'target': 'offbeat.tasks.arithmetic:correct', 'options': {}}
    >>> reference(lambda text, columns: 1.0)
    Traceback (most recent call last):
    ...
    offbeat.errors.UnreachableFunction: <lambda> cannot be imported by a scoring worker; ...
    """
    options: dict[str, Json] = {}
    while (place := find_name(function)) is None and isinstance(function, partial):
        if function.args:
            raise UnreachableFunction(
                f"{function!r:.200}: only keyword arguments reach a scoring worker; pass them by name, or give the "
                "partial a name at the top level of the file"
            )
        options = dict(function.keywords) | options
        function = function.func
    if place is None:
        name = function.__qualname__ if isinstance(function, FunctionType) else type(function).__qualname__
        raise UnreachableFunction(
            f"{name} cannot be imported by a scoring worker; define it with `def` at the top level of a file, or give "
            "it a name there (in a notebook: write that file with %%writefile and import it)"
        )
    module, name = place
    home = module.__name__
    if home == "__main__":
        if module.__file__ is None:
            raise UnreachableFunction(
                f"{name} is defined in a session without a file; put it into a file and import it"
            )
        home = f"{_FILE}{Path(module.__file__).resolve()}"
    try:
        json.dumps(options, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UnreachableFunction(f"the keyword arguments of {name} must be JSON: {error}") from None
    return {"target": f"{home}:{name}", "options": options}


def find_name(function: Callable[..., object]) -> tuple[ModuleType, str] | None:
    """Return the module and the name by which a function or another callable object can be imported, if there is one.

    An object of a class of another module is looked for in `__main__` and in files that were loaded by their path.
    """
    home = sys.modules.get(str(getattr(function, "__module__", "")))
    if home is not None and isinstance(function, FunctionType):
        found: object = home
        for part in function.__qualname__.split("."):
            found = getattr(found, part, None)
        if found is function:
            return home, function.__qualname__
    files = [module for name, module in list(sys.modules.items()) if name.startswith((_FILE, "__main__"))]
    for module in filter(None, [home, *files]):
        for name, value in list(vars(module).items()):
            if value is function:
                return module, name
    return None


def load_module(home: str) -> ModuleType:
    """Load what stands before the colon of a reference: a Python file, or a module."""
    path = home.removeprefix(_FILE)
    return load_file(Path(path)) if path.endswith(".py") or path != home else importlib.import_module(home)


def is_reference(name: object) -> bool:
    """Return True for the reference of a part of your own: `path/to/file.py:name`, or `module:name`."""
    home, _, part = name.rpartition(":") if isinstance(name, str) else ("", "", "")
    return bool(home) and part.isidentifier()


def load_own(target: str) -> object:
    """Load a part of your own from its reference; raise `OwnPartError` with a sentence if that fails.

    >>> load_own("math:isclos")
    Traceback (most recent call last):
    offbeat.errors.OwnPartError: math has no 'isclos'; did you mean 'isclose'?
    """
    home, _, name = target.rpartition(":")
    try:
        module = load_module(home)
    except FileNotFoundError as error:
        raise OwnPartError(str(error)) from None
    except ModuleNotFoundError as error:
        if error.name == home.split(".")[0]:
            raise OwnPartError(f"{home} is no module; for a file write its path, ending in .py") from None
        raise OwnPartError(f"{home} needs {error.name}, which is not installed: pip install {error.name}") from error
    except Exception as error:  # the file is yours, and may raise anything
        raise OwnPartError(f"{home} cannot be loaded: {describe_error(error, home)}; fix the file") from error
    if (found := getattr(module, name, None)) is None:
        defined = [one for one in vars(module) if not one.startswith("_")]
        raise OwnPartError(f"{home} has no {name!r}; {suggest_nearest(name, defined)}")
    return cast("object", found)


def describe_error(error: Exception, path: str) -> str:
    """Describe an error that a file of yours raised, with the last line of the file that led to it."""
    own = str(Path(path).resolve())
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == own]
    at = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    what = error.msg if isinstance(error, SyntaxError) else first_line(error)
    return f"{type(error).__name__}: {what}" + (f" (line {at})" if at else "")


def resolve(target: str, options: "dict[str, Json] | None" = None) -> Callable[..., object]:
    """Load a function from its reference.

    >>> resolve("math:isclose", {"abs_tol": 0.1})(1.0, 1.05)
    True
    """
    home, _, name = target.rpartition(":")
    found: object = load_module(home)
    for part in name.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{target} is {found!r:.80}, not a function")
    return partial(found, **options) if options else found


@cache
def is_installed(file: str) -> bool:
    """Return True for a file of Python, of offbeat or of an installed package, which is none of your own."""
    path, kinds = Path(file).resolve(), ("stdlib", "platstdlib", "purelib", "platlib")
    places = {Path(__file__).resolve().parent, *(Path(sysconfig.get_path(kind)).resolve() for kind in kinds)}
    packages = {"site-packages", "dist-packages"}.intersection(path.parts)
    return file.startswith("<frozen ") or bool(packages) or not places.isdisjoint(path.parents)


def own_root(module: ModuleType) -> str | None:
    """Return the directory from which a module of your own is imported; None for installed ones."""
    file = getattr(module, "__file__", None)
    if file is None or is_installed(file):
        return None
    path = Path(file).resolve()
    return str(path.parents[module.__name__.count(".") + (path.stem == "__init__")])


def own_imports(modules: Mapping[str, str]) -> dict[str, str]:
    """Return the modules of your own, with their files, that these modules import, at any depth, also in functions."""
    found, waiting = dict(modules), [*modules]
    while waiting:
        home = waiting.pop()
        package = home if Path(found[home]).stem == "__init__" else home.rpartition(".")[0]
        for path in _imported_names(found[home], package):
            for name in accumulate(path.split("."), "{}.{}".format):  # outer packages first
                if name not in found:
                    place = _own_place(name)
                    if not place:
                        break
                    if place.endswith(".py"):
                        found[name] = place
                        waiting.append(name)
    return {name: file for name, file in found.items() if name not in modules}


def _imported_names(file: str, package: str) -> Iterator[str]:
    with suppress(OSError, SyntaxError, ValueError, RecursionError):
        for node in ast.walk(ast.parse(Path(file).read_bytes())):
            if isinstance(node, ast.Import):
                yield from (one.name for one in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
                yield from (".".join(filter(None, [*above, node.module, one.name])) for one in node.names)


def _own_place(name: str) -> str:
    """Return the file or folder of a module of your own; empty for an installed one and for none."""
    with suppress(Exception):  # it may not exist, and its package may raise anything
        spec = find_spec(name)
        if spec and (spec.has_location or spec.submodule_search_locations):
            place = spec.origin or next(iter(spec.submodule_search_locations or [""]))
            return "" if is_installed(place) else place
    return ""


@contextmanager
def temporary_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the length of the block, and restore the previous values afterwards.

    >>> with temporary_environment({"OFFBEAT_EXAMPLE": "1"}):
    ...     os.environ["OFFBEAT_EXAMPLE"]
    '1'
    >>> "OFFBEAT_EXAMPLE" in os.environ
    False
    """
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Turn off the progress bars of transformers for a block: they would break what offbeat shows."""
    from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

    shown = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            enable_progress_bar()


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pause the garbage collector for the length of a block.

    What an import makes stays, but the collector visits all of it again and again: a tenth of the time that torch and
    transformers take to load.

    >>> with paused_collector():
    ...     gc.isenabled()
    False
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
