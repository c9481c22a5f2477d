"""Models of a directory or of the Hugging Face hub, and the gate that each passes before a library opens it. No torch.

    model_directory("models/mine")                           a directory that passes the gate is returned as it is
    model_directory("Qwen/Qwen2.5-0.5B-Instruct", commit)    its snapshot in the hub's cache, downloaded if needed
    find_model("Qwen/Qwen2.5-0.5B-Instruct").commit          the newest commit; downloads only the small files

    file list ─ refuse code and pickles ─ small files ─ refuse auto_map ─ weights ─ gate

What the gate refuses, with one sentence that names the file, what is wrong with it, and what to do:

    *.py, auto_map                   code that a library could run
    adapter_config.json              a library would load another model than the one in the directory
    *.bin, *.pt, … alone             weights that would have to be unpickled
    torn headers, missing shards     damage that a library reports in its own words, late, or never

Only *.safetensors, JSON, templates and vocabularies are downloaded. A model that needs its own code, or whose weights
would have to be unpickled, is refused before its weights are downloaded. The environment variables of huggingface_hub
apply: HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE.
"""

import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from offbeat.errors import HubError, ModelUnreadable, first_line

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
PICKLES: Final = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
"""How names of files end that would have to be unpickled."""
LONGEST_HEADER: Final = 100 << 20
"""Bytes; the limit of safetensors itself."""
_MAY_NAME_CODE: Final = ("config.json", "tokenizer_config.json", "generation_config.json", "processor_config.json")
_GIANTS: Final = re.compile(r'"((?:num|n)_[a-z_]*(?:layer|head|expert)[a-z_]*)": (\d{5,})')  # would be built for ever
_ADAPTER: Final = "adapter_config.json"


def check_model(directory: Path) -> None:
    """Raise `ModelUnreadable` with one sentence if no command may open this model."""
    if problems := model_problems(directory):
        raise ModelUnreadable(f"{directory}: {problems[0]}")


def model_problems(directory: Path, *, weights: bool = True) -> list[str]:
    """Return why no command may open the model in a directory. Without `weights`, they are not downloaded yet.

    >>> model_problems(Path("nowhere"))
    ['there is no config.json; give the directory of a Hugging Face model']
    """
    if not (directory / "config.json").is_file():
        return ["there is no config.json; give the directory of a Hugging Face model"]
    try:
        if odd := [one.name for one in directory.iterdir() if one.exists() and not (one.is_file() or one.is_dir())]:
            return [f"{odd[0]} is neither a file nor a directory; remove it"]
        giants = _GIANTS.findall(json.dumps(read_object(directory / "config.json")))
        found = _find_code(directory) + [f"config.json says {x} = {n}, more than 9999; correct it" for x, n in giants]
        return found + _find_broken_weights(directory) if weights else found
    except ModelUnreadable as error:
        return [f"{error}; download the model again"]


def mapped_code(directory: Path) -> list[str]:
    """Return the JSON files of a model that name code to run."""
    files = [name for name in _MAY_NAME_CODE if (directory / name).is_file()]
    return [name for name in files if "auto_map" in read_object(directory / name)]


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model. Raises `ModelUnreadable`."""
    try:
        if not file.is_file() or file.stat().st_size > LONGEST_HEADER:
            raise ValueError(f"it is not a regular file of at most {LONGEST_HEADER >> 20} MiB")
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelUnreadable(f"{file} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ModelUnreadable(f"{file} is damaged: it is not a JSON object")
    return found


def safetensors_header(file: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, one entry for each tensor, and where their data begins.

    Raises `ModelUnreadable`, also if the file is cut.
    """
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= LONGEST_HEADER:
                raise ValueError("it has no header")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise ModelUnreadable(f"{file} is not a safetensors file: {error}") from None
    if (size := file.stat().st_size) != end:
        raise ModelUnreadable(f"{file} is damaged: it has {size} bytes, and its header says {end}")
    return header, 8 + length


def count_elements(file: Path) -> int:
    """Count the numbers in a safetensors file from its header. Raises `ModelUnreadable`, also if the file is cut."""
    header, _ = safetensors_header(file)
    try:
        return sum(int(math.prod(entry["shape"])) for entry in header.values())
    except (KeyError, TypeError, ValueError) as error:
        raise ModelUnreadable(f"{file} is not a safetensors file: {error}") from None


def _find_code(directory: Path) -> list[str]:
    files = sorted(file.name for file in directory.rglob("*.py"))
    what = [*files[:3], *(f"auto_map in {name}" for name in mapped_code(directory))]
    if what:
        return [f"it brings code ({', '.join(what)}), which offbeat never runs; use a model that is built in to "
                "transformers"]  # fmt: skip
    if (directory / _ADAPTER).is_file():
        return [f"it holds an adapter ({_ADAPTER}), which stands for another model; merge the two with `offbeat export "
                "--merge`, or with `merge_and_unload` of peft, and use the result"]  # fmt: skip
    return []


def _find_broken_weights(directory: Path) -> list[str]:
    if not (files := sorted(directory.glob("*.safetensors"))):
        pickled = sorted(file.name for file in directory.iterdir() if file.name.endswith(PICKLES))
        why = f"{pickled[0]} would have to be unpickled" if pickled else "there are no weights"
        return [f"{why}; save it as *.safetensors with `save_pretrained` of transformers"]
    if (directory / INDEX).is_file():
        shards = read_object(directory / INDEX).get("weight_map")
        if not isinstance(shards, dict) or any(not isinstance(one, str) or "/" in one for one in shards.values()):
            return [f"{INDEX} is not an index of weight files; download the model again"]
        if missing := sorted(name for name in set(shards.values()) if not (directory / name).is_file()):
            return [f"{missing[0]} is missing (weight files missing: {len(missing)}); download the model again"]
    if not sum(count_elements(file) for file in files):
        return ["its weight files hold no weights; download the model again"]
    return []


PREFIX: Final = "hf:"
"""Marks a name as one of the hub, also where a directory of that name exists."""
NEWEST: Final = "main"
"""The branch that a name without a revision means."""
_NAME: Final = re.compile(r"[\w.-]+/[\w.-]+")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_SMALL: Final = re.compile(r"[^/]+\.json|[^/]+\.jinja|tokenizer\.model|(merges|vocab)[^/]*\.txt")
_BYTES: Final = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_TIMEOUT: Final = 20.0
"""Seconds for one answer of the hub."""


@dataclass(frozen=True)
class HubModel:
    """One commit of a model. Its small files are in `directory`."""

    name: str
    commit: str
    directory: Path
    weights: Mapping[str, int]
    """Weight files and their sizes in bytes."""

    @property
    def missing_bytes(self) -> int:
        """What is still to be downloaded."""
        return sum(size for file, size in self.weights.items() if not (self.directory / file).is_file())

    @property
    def parameters(self) -> int:
        """The number of parameters, from the sizes of the files and the dtype in config.json."""
        config = _read_json(self.directory / "config.json")
        dtype = config.get("dtype", config.get("torch_dtype", "float32"))
        return sum(self.weights.values()) // _BYTES.get(str(dtype), 4)


def hub_name(path: str) -> str | None:
    """Return `owner/name` if a path names a model of the hub: exactly one slash, and no such directory here.

    >>> hub_name("Qwen/Qwen2.5-0.5B-Instruct"), hub_name("hf:Qwen/Qwen2.5-0.5B-Instruct")
    ('Qwen/Qwen2.5-0.5B-Instruct', 'Qwen/Qwen2.5-0.5B-Instruct')
    >>> hub_name("/data/model"), hub_name("model"), hub_name("../model")
    (None, None, None)
    """
    name = path.removeprefix(PREFIX)
    if not _NAME.fullmatch(name) or name.startswith((".", "-")):
        return None
    return name if path.startswith(PREFIX) or not Path(path).is_dir() else None


def model_directory(path: str, revision: str | None = None) -> Path:
    """Return the directory of a model, given its path or hub name. Downloads what is missing.

    Raises `HubError`, or `ModelUnreadable` if the directory does not pass the gate. A commit that was downloaded
    before needs no network.

    >>> model_directory("nowhere")
    Traceback (most recent call last):
    offbeat.errors.HubError: 'nowhere' is neither the directory of a model nor the name of one on the hub, owner/name
    """
    if hub_name(path) is None:
        if not Path(path).is_dir():
            raise HubError(f"{path!r} is neither the directory of a model nor the name of one on the hub, owner/name")
        check_model(Path(path))
        return Path(path)
    model = find_model(path, revision)
    if model.missing_bytes:
        with _clear_errors(model.name, revision):
            _download(model.name, model.commit, model.weights)
        if model.missing_bytes:
            raise HubError(
                f"the download of {model.name} is not complete: {model.missing_bytes} bytes are missing; try again"
            )
    check_model(model.directory)
    return model.directory


def find_model(path: str, revision: str | None = None) -> HubModel:
    """Find a model of the hub and download its small files. Raises `HubError` if a run could not use it.

    `revision` is a commit, branch or tag; left out, the newest commit. Without a network, a complete snapshot that was
    downloaded before is used.
    """
    name = hub_name(path)
    if name is None:
        raise HubError(f"{path!r} is not the name of a model on the hub; write it as owner/name")
    if revision and _COMMIT.fullmatch(revision) and (cached := _find_cached(name, revision)):
        return cached
    with _clear_errors(name, revision):
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError

        try:
            info = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=_TIMEOUT)
        except HfHubHTTPError as error:
            if error.response.status_code < 500:
                raise
            return _cached_instead(name, revision, error)
        except _network_errors() as error:
            return _cached_instead(name, revision, error)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
        commit = str(info.sha)
        _refuse_files(name, sizes)
        directory = _download(name, commit, [file for file in sizes if _SMALL.fullmatch(file)])
        _refuse_code_maps(name, directory)
        files = weight_files(directory, sizes)
        if unlisted := [file for file in files if file not in sizes]:
            raise HubError(f"{name} lists {unlisted[0]} in {INDEX}, but has no such file; choose another revision")
        _remember(directory, revision or NEWEST, commit)
        return HubModel(name, commit, directory, {file: sizes[file] for file in files})


def weight_files(directory: Path, files: Iterable[str]) -> list[str]:
    """Return which of the files of a model hold its weights: those of its index, or model.safetensors, or all.

    >>> weight_files(Path("nowhere"), ["model.safetensors", "consolidated.safetensors"])
    ['model.safetensors']
    """
    if (directory / INDEX).is_file():
        names = _read_json(directory / INDEX).get("weight_map")
        if not isinstance(names, dict) or any(not isinstance(one, str) or "/" in one for one in names.values()):
            raise HubError(f"{directory / INDEX} is not an index of weight files; choose another revision of the model")
        return sorted(set(names.values()))
    found = sorted(file for file in files if file.endswith(".safetensors") and "/" not in file)
    return [SINGLE] if SINGLE in found else found


def _find_cached(name: str, revision: str) -> HubModel | None:
    """Return a commit or branch from the cache, if all its weights are there."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json", revision=revision)
    if not isinstance(found, str):
        return None
    directory = Path(found).parent
    files = weight_files(directory, [file.name for file in directory.iterdir()])
    if not files or not all((directory / file).is_file() for file in files):
        return None
    _refuse_code_maps(name, directory)
    return HubModel(name, directory.name, directory, {file: (directory / file).stat().st_size for file in files})


def _cached_instead(name: str, revision: str | None, error: Exception) -> HubModel:
    if cached := _find_cached(name, revision or NEWEST):
        return cached
    raise HubError(
        f"the hub cannot be reached ({first_line(error)}), and {_with_revision(name, revision)} is not downloaded "
        f"yet; connect this machine, or run `hf download {name} --local-dir DIR` on one that is connected, copy DIR "
        "to here, and set model.path to it"
    ) from error


def _refuse_files(name: str, files: Mapping[str, int]) -> None:
    if code := sorted(file for file in files if file.endswith(".py")):
        raise HubError(
            f"{name} brings code ({', '.join(code[:3])}), which offbeat never runs; use a model that is built in to "
            "transformers. Nothing was downloaded"
        )
    if any(file.endswith(".safetensors") and "/" not in file for file in files):
        return
    pickled = sorted(file for file in files if file.endswith(PICKLES))
    why = f"{pickled[0]} would have to be unpickled" if pickled else "there are no *.safetensors"
    raise HubError(
        f"{name} has no weights that offbeat reads: {why}; use a revision with *.safetensors. Nothing was downloaded"
    )


def _refuse_code_maps(name: str, directory: Path) -> None:
    if not (directory / "config.json").is_file():
        raise HubError(f"{name} has no config.json, so it is not a model of transformers; choose another one")
    try:
        files = mapped_code(directory)
    except ModelUnreadable as error:
        raise HubError(f"{error}; remove it and try again") from None
    if files:
        raise HubError(
            f"{name} needs its own code (auto_map in {files[0]}), which offbeat never runs; use a model that is built "
            "in to transformers. Its weights were not downloaded"
        )


def _download(name: str, commit: str, files: Iterable[str]) -> Path:
    from huggingface_hub import snapshot_download

    with _bars_on_terminals():
        found = snapshot_download(name, revision=commit, allow_patterns=list(files), etag_timeout=_TIMEOUT)
    return Path(found)


def _remember(directory: Path, revision: str, commit: str) -> None:
    """Note in the hub's cache which commit a branch is at, so that the name works without a network too."""
    if revision != commit:
        ref = directory.parent.parent / "refs" / revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(commit, encoding="utf-8")


@contextmanager
def _bars_on_terminals() -> Iterator[None]:
    """Show huggingface_hub's progress bars on a terminal, and only there."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    before = are_progress_bars_disabled()
    (enable_progress_bars if sys.stderr.isatty() else disable_progress_bars)()
    try:
        yield
    finally:
        (disable_progress_bars if before else enable_progress_bars)()


@contextmanager
def _clear_errors(name: str, revision: str | None) -> Iterator[None]:
    """Turn the errors of huggingface_hub into sentences."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        yield
    except GatedRepoError as error:
        raise HubError(f"{name} is gated: accept its terms on its page of the hub, then set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise HubError(f"{name} has no revision {revision!r}; give a commit, branch or tag, or leave it out") from error
    except RepositoryNotFoundError as error:
        raise HubError(
            f"the hub has no model {name!r} (or it is private and HF_TOKEN is not set), and there is no such directory "
            "here; check the spelling"
        ) from error
    except _network_errors() as error:
        raise HubError(
            f"the download of {_with_revision(name, revision)} failed ({type(error).__name__}: {first_line(error)}); "
            "run the command again: files that are complete are kept"
        ) from error


def _network_errors() -> tuple[type[Exception], ...]:
    """Return the errors of huggingface_hub and of its HTTP client, which differs between its releases."""
    from huggingface_hub import errors

    client: Any = errors
    return (client.HTTPError, OSError)


def _with_revision(name: str, revision: str | None) -> str:
    return f"{name} ({revision})" if revision else name


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return read_object(file)
    except ModelUnreadable as error:
        raise HubError(f"{error}; choose another revision of the model, or remove the file and try again") from None
