"""Problems outside the configuration file that would stop a run: model, task, log, your own parts, extras. No torch.

Each problem begins with the setting it is about and ends with what to do. `offbeat check` lists them all;
`offbeat train` looks for them before it loads anything.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Final

from offbeat.config import Config
from offbeat.config.conflicts import conflicts
from offbeat.config.known import Doubt, LagEvidence, LagFinding, with_preset
from offbeat.config.parts import SINKS, EngineKind
from offbeat.errors import (
    CannotPlace,
    HubError,
    LogError,
    ModelUnreadable,
    OwnPartError,
    TaskError,
    UnreachableFunction,
    suggest_nearest,
)
from offbeat.hub import find_model, hub_name
from offbeat.imports import EXTRAS, install_command, load_own, missing_modules, resolve
from offbeat.objective.presets import PRESETS
from offbeat.objective.spec import Advantage, Need, Objective
from offbeat.placement.hardware import Hardware
from offbeat.placement.nearest import plan_devices
from offbeat.placement.plan import DevicePlan, cannot_split
from offbeat.placement.shape import ModelShape
from offbeat.preflight.forecast import ModelFiles, log_exists
from offbeat.tasks.data import Deferred
from offbeat.tasks.rewards import OF_TRL, Reward
from offbeat.tasks.task import FACTORIES, OF_EVERY_TASK, Task, make
from offbeat.tasks.tokenizer import variable_problem

KINDS: Final[Mapping[Any, tuple[str, tuple[type, ...]]]] = {
    int: ("a whole number", (int,)),
    float: ("a number", (float, int)),
    bool: ("true or false", (bool,)),
    str: ("text", (str,)),
}
"""Annotations of task options: each in words, and the types that TOML gives for it."""
TAKES: Final[Mapping[str, tuple[str, ...]]] = {
    "objective.advantage": ("rewards_BG", "scored_BG"),
    "objective.gate": ("ratios_NT", "advantages_N1"),
    "objective.weight": ("ratios_NT", "advantages_N1"),
    "sync.cadence": ("since", "publish_seconds"),
    "engine.kind": ("config", "place"),
    "run.sinks": ("run",),
}
"""The arguments with which each part is called."""
COUNTED: Final = ("logprobs_known", "oldest_version IS NULL")
"""How many groups of a log have log-probs, and how many have no version."""
ROWS = 10_000
"""Examples whose columns are compared with what rewards need."""


def preflight(config: Config, *, here: bool = True) -> list[str]:
    """Return all problems. Without `here`, the run is for another machine: what is installed on this one is no matter.

    >>> from offbeat.config import parse
    >>> preflight(parse({"model": {"path": "smolm2"}, "task": {"options": {"digit": 3}}}))[1]
    "task.options.digit is not an option of task 'arithmetic'; did you mean 'digits'?"
    """
    files, found = _check_model(config)
    task, problems = _check_task(config) if config.asks else (None, [])
    found += problems + _check_evaluation_task(config)
    if files is not None:
        found += (_check_lengths(config, files) if config.asks else []) + _check_split(config, files)
        if values := config.model.chat_template_kwargs:
            problem = variable_problem(files.chat_template, values)
            found += [f"model.chat_template_kwargs = {values}: {problem}"] if problem else []
        if task is not None:
            found += _check_chat(config, files, task)
    found += check_own_parts(config)
    if here:
        found += check_log(config, model_size(config)) + _check_extras(config)
    if not config.accept:
        found += [finding.text for finding in lag_findings(config) if finding.level is Doubt.LOSES]
    return found


def lag_findings(config: Config) -> list[LagFinding]:
    """Return what is known to lose in a run's lag, or what nobody has shown; nothing if neither."""
    try:
        finding = lag_evidence(config, LogContents.of(config), model_size(config)).finding()
    except LogError:  # `check_log` reports it
        return []
    return [] if finding is None else [finding]


def model_size(config: Config) -> float:
    """Return the number of parameters of a run's model; infinite if its files cannot be read."""
    try:
        return model_files(config).parameters if config.model.path else inf
    except (HubError, LogError, ModelUnreadable, OSError):
        return inf


def _check_model(config: Config) -> tuple[ModelFiles | None, list[str]]:
    path, revision = config.model.path, config.model.revision
    if not path:
        return None, ["model.path is not set; give the directory of a model (`offbeat quickstart` makes a tiny one)"]
    if hub_name(path) is None and not Path(path).is_dir():
        return None, [f"model.path = {path!r} is not a directory; {_suggest_model(Path(path))}"]
    if hub_name(path) is None and revision is not None:
        return None, [f"model.revision = {revision!r} has no effect: model.path is a directory; remove it"]
    if hub_name(path) is not None and missing_modules(["huggingface_hub"]):
        install = install_command("train")
        return None, [f"model.path = {path!r} is not a directory, and hub names need huggingface_hub: {install}"]
    try:
        files = model_files(config)
    except HubError as error:
        return None, [f"model.path = {path!r}: {error}"]
    problems = [problem.replace(str(files.path), path) for problem in files.problems()]
    return (None if problems else files), problems


def model_files(config: Config) -> ModelFiles:
    """Return the files of a run's model; of one on the hub only the small files, if it is not downloaded yet."""
    if hub_name(config.model.path) is None:
        return ModelFiles(Path(config.model.path))
    model = find_model(config.model.path, config.model.revision)
    return ModelFiles(model.directory, model.parameters if model.missing_bytes else 0)


def missing_engine(config: Config) -> str:
    """Return a line that says that transformers generates for lack of vLLM, or an empty text.

    A tiny model is no slower with transformers.
    """
    if config.engine.kind != "hf" or config.run.mode == "offline" or not missing_modules(["vllm"]):
        return ""
    if hub_name(config.model.path) is None and ModelFiles(Path(config.model.path)).tiny:
        return ""
    return f"vLLM is not installed, so transformers generates, more slowly: {install_command('vllm')}"


def device_plan(config: Config, gpus: str) -> DevicePlan:
    """Return the plan of a run that passed `check_devices` for this hardware."""
    shape = ModelShape.from_config(model_files(config).config)
    return plan_devices(config, shape, Hardware.parse(gpus))


def check_devices(config: Config, hardware: Hardware) -> list[str]:
    """Check that the run fits on these GPUs."""
    try:
        plan_devices(config, ModelShape.from_config(model_files(config).config), hardware)
    except CannotPlace as error:
        return [str(error)]
    except ModelUnreadable as error:
        return [f"model.path = {config.model.path!r}: {error}, so GPUs cannot be planned for it; use a dense decoder"]
    return []


def _check_split(config: Config, files: ModelFiles) -> list[str]:
    """Check that the engine's GPUs divide the heads of the model."""
    split = config.engine.tensor_parallel
    if split == 1:
        return []
    if not EngineKind.of(config.engine.kind).splits:
        return [f"engine.tensor_parallel = {split} has no effect with engine.kind = {config.engine.kind!r}; remove it"]
    try:
        reason = cannot_split(ModelShape.from_config(files.config), split)
    except ModelUnreadable:
        return []  # vLLM checks it when it starts
    return [reason] if reason else []


def _check_lengths(config: Config, files: ModelFiles) -> list[str]:
    """Check that prompt and completion fit into the model's context and into a micro-batch."""
    context, longest = files.integer("max_position_embeddings", default=1 << 30), config.sampling.max_tokens
    if longest >= context:
        budget, room = config.trainer.token_budget, config.trainer.token_budget - config.engine.max_prompt_tokens
        fitting = f"at most {context - 1 if budget >= context else room}"
        if room < 1 and budget < context:  # no length fits into a micro-batch as it is
            fitting = f"sampling.max_tokens = {context - 1}, trainer.token_budget = {context}"
        return [
            f"sampling.max_tokens = {longest}: the model reads {context} tokens, prompt included, and a micro-batch "
            f"holds {budget}; set {fitting}"
        ]
    prompt = min(config.engine.max_prompt_tokens, context - longest)
    if prompt + longest > config.trainer.token_budget:
        return [
            f"trainer.token_budget = {config.trainer.token_budget} cannot hold a prompt of {prompt} tokens and a "
            f"completion of {longest}; set at least {prompt + longest}, or lower engine.max_prompt_tokens"
        ]
    return []


def _suggest_model(path: Path) -> str:
    beside = sorted(entry.name for entry in path.parent.iterdir() if entry.is_dir()) if path.parent.is_dir() else []
    near = suggest_nearest(path.name, beside)
    if near.startswith("did"):
        return near
    return "give the directory of a Hugging Face model, or its name on the hub, owner/name"


def _check_task(config: Config) -> tuple[Task | None, list[str]]:
    name, options = config.task.name, config.task.options
    own = name.endswith(".py")
    if own and not Path(name).is_file():
        return None, [f"task.name = {name!r} is not a file; give the path of your task's Python file"]
    if not own and name not in FACTORIES:
        return None, [f"task.name = {name!r} is not a task; {suggest_nearest(name, FACTORIES)}"]
    try:
        known = inspect.signature(resolve(FACTORIES["custom" if own else name])).parameters
        theirs = {option: value for option, value in options.items() if option not in OF_EVERY_TASK}
        if problems := _check_options(name, {**theirs, "path": name} if own else theirs, known):
            return None, problems
        task = make(name, options)
        return task, _check_playable(config, task) + (check_columns(task, name) if own else [])
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").split(".")[0])
        fix = install_command(extra) if extra else f"pip install {error.name}"
        return None, [f"task.name = {name!r} needs {error.name}, which is not installed: {fix}"]
    except (TaskError, UnreachableFunction, OSError) as error:
        about = "task.options" if options else f"task.name = {name!r}"
        return None, [f"{about}: {error}"]
    except Exception as error:  # the boundary to your own file: any error it raises is reported as its problem
        fix = "; fix the file" if own else ""
        return None, [f"task.name = {name!r} cannot be used: {type(error).__name__}: {error}{fix}"]


def _check_evaluation_task(config: Config) -> list[str]:
    """Check the task of evaluation as that of training."""
    evaluation = config.evaluation
    if not evaluation.task:
        return []
    section = config.task.model_copy(update={"name": evaluation.task, "options": evaluation.options})
    _, problems = _check_task(config.model_copy(update={"task": section}))
    return [
        one.replace("task.name", "evaluation.task").replace("task.options", "evaluation.options") for one in problems
    ]


def _check_playable(config: Config, task: Task) -> list[str]:
    """Check what a run cannot do with a task."""
    found = []
    low, high = task.reward_range
    if config.objective.resolve().advantage is Advantage.REWARD and low < 0:
        found.append(
            f"objective.advantage = 'reward' imitates answers, but task {config.task.name!r} gives rewards from "
            f"{low:g}, and negative ones push without limit; scale its rewards and set its reward_range"
        )
    if config.objective.resolve().advantage is Advantage.SHRUNK and not (low >= 0 and high <= 1):
        found.append(
            f"objective.advantage = 'shrunk' needs rewards from 0 to 1, but task {config.task.name!r} gives {low:g} to "
            f"{high:g}; scale its rewards and set its reward_range"
        )
    return found


def _check_options(name: str, options: Mapping[str, Any], known: Mapping[str, inspect.Parameter]) -> list[str]:
    found = [
        f"task.options.{option} is not an option of task {name!r}; {suggest_nearest(option, known)}"
        for option in options
        if option not in known
    ]
    for option, one in known.items():
        if (kind := KINDS.get(one.annotation)) and option in options and type(options[option]) not in kind[1]:
            given = f"task.options.{option} = {options[option]!r:.80}"
            default = "" if one.default is one.empty else f"; the default is {one.default!r}"
            found.append(f"{given}: it takes {kind[0]}{default}")
    source = options.get("source")
    if isinstance(source, str) and source.endswith((".jsonl", ".parquet")) and not Path(source).is_file():
        found.append(f"task.options.source = {source!r} is not a file; give the path of the data")
    needed = [key for key, one in known.items() if one.default is one.empty and key not in options]
    return found + [f"task.options.{key} is not set, and task {name!r} needs it; write options = {{ {key} = … }}"
                    for key in needed]  # fmt: skip


def _check_chat(config: Config, files: ModelFiles, task: Task) -> list[str]:
    """Check that chat messages have a template. For data that would have to be loaded first, the run checks it."""
    if files.chat_template or isinstance(task.examples, Deferred) or isinstance(task.examples[0].prompt, str):
        return []
    return [
        f"task.name = {config.task.name!r} asks in chat messages, but the tokenizer in {config.model.path!r} has no "
        "chat template; set chat = false in task.options, or use a chat model"
    ]


def _check_extras(config: Config) -> list[str]:
    found = []
    if missing := missing_modules(["torch", "transformers", "lance", "safetensors"]):
        found.append(f"training needs {', '.join(missing)}: {install_command('train')}")
    module = EngineKind.of(config.engine.kind).module
    if module and config.run.mode != "offline" and missing_modules([module]):
        found.append(
            f"engine.kind = {config.engine.kind!r}: {module} is not installed: {install_command(module)}, or set "
            'engine.kind = "hf"'
        )
    if config.adapter.rank and missing_modules(["peft"]):
        found.append(f"adapter.rank = {config.adapter.rank}: peft is not installed: {install_command('lora')}")
    if config.run.place == "ray" and missing_modules(["ray"]):
        found.append(f"run.place = 'ray': ray is not installed: {install_command('ray')}, or set run.place = \"local\"")
    for sink in config.run.sinks:
        if sink in SINKS and (module := SINKS[sink].module) and missing_modules([module]):
            found.append(f"run.sinks: {sink} is not installed: {install_command(module)}, or leave it out")
    return found


@dataclass(frozen=True)
class LogContents:
    """How many groups the experience log holds that a run starts from."""

    groups: int = 0
    with_logprobs: int = 0
    without_version: int = 0

    @classmethod
    def of(cls, config: Config) -> "LogContents":
        """Read the log of a run; without one, there are no groups. Raises `LogError` if it cannot be read."""
        if not config.run.experience or missing_modules(["lance"]) or not log_exists(config.run.experience):
            return cls()
        from offbeat.experience.schema import Tables

        table = Tables.open(config.run.experience, create=False).groups
        rows = table.rows()
        return cls(rows, *(table.scan(0, rows, [], which).num_rows for which in COUNTED))


def check_log(config: Config, parameters: float) -> list[str]:
    """Check that the experience log a run starts from exists and holds what the objective needs."""
    uri = config.run.experience
    if not uri or missing_modules(["lance"]):
        return []
    if not log_exists(uri):
        if config.run.mode != "offline":
            return []  # a run that generates creates it
        return [
            f"run.experience = {uri!r} is not an experience log; make one with `offbeat import FILE --into {uri} …`"
        ]
    try:
        return log_problems(config, LogContents.of(config), parameters)
    except LogError as error:
        return [f"run.experience = {uri!r}: {error}"]


def log_problems(config: Config, log: LogContents, parameters: float) -> list[str]:
    """Return what is missing in a log with these contents."""
    uri, preset, offline = config.run.experience, config.objective.preset, config.run.mode == "offline"
    if not log.groups and offline:
        return [f"run.experience = {uri!r} holds no groups; add some with `offbeat import FILE --into {uri} …`"]
    replays = offline or config.sampler.mode == "replay"
    if not (replays and log.groups and not log.with_logprobs and Need.BEHAVIOR in config.objective.resolve().needs):
        return []
    suitable = []
    for name, one in PRESETS.items():
        changed = with_preset(config, name)
        lost = not config.accept and lag_evidence(changed, log, parameters).losing_row() is not None
        if Need.BEHAVIOR not in one.objective.needs and not lost and not conflicts(changed):
            suitable.append(name)
    way = f"choose one of {', '.join(suitable)}, which need none" if suitable else "use a log with log-probs"
    return [
        f"objective.preset = {preset!r} needs the behavior policy's log-probs, but none of the {log.groups} groups in "
        f"{uri} has them; {way}"
    ]


def lag_evidence(config: Config, log: LogContents, parameters: float) -> LagEvidence:
    """Return the evidence about a run's lag. Groups without a version may have any age."""
    any_age = log.without_version > 0 and config.run.mode != "offline"
    return LagEvidence(config, parameters, any_age, logprobs=log.with_logprobs > 0 or not log.groups)


def offline_length(config: Config) -> str:
    """Say how many steps the log of an offline run holds; empty if that is not known.

    With `sampler.epochs` left out, the log is never used up.
    """
    uri, batch, epochs = config.run.experience, config.prompts_per_step, config.sampler.epochs
    if config.run.mode != "offline" or missing_modules(["lance"]) or not log_exists(uri):
        return ""
    from offbeat.experience.reader import LogReader

    ripe = LogReader.open(uri).index_since(None)[0].ripe
    groups, waiting = int(ripe.sum()), int((~ripe).sum())
    later = f"; {waiting} more wait for a score (`offbeat log pending {uri}`)" if waiting else ""
    if not groups:
        return f"{uri}: no group has its scores yet{later}"
    if epochs is None:
        passes = config.steps * min(batch, groups) / groups
        return f"{uri}: {groups} groups, so {config.steps} steps are {passes:.3g} passes over them{later}"
    steps = -(-groups * epochs // batch) if groups >= batch else epochs
    sum_ = f"{groups} groups × {epochs} epochs ÷ {batch} = {steps} steps"
    if groups < batch:
        sum_ = f"{groups} groups, all in one batch, × {epochs} epochs = {steps} steps"
    asked = "" if steps >= config.steps else f"; you asked for {config.steps}, and the run ends when the log is used up"
    return f"{uri}: {sum_}{asked}{later}"


def check_columns(task: Task, name: str) -> list[str]:
    """Return one problem for each column that a reward function needs and some examples do not have.

    A function that only raises is a problem too: nobody has written it yet.
    """
    examples = task.examples[: min(ROWS, len(task.examples))]
    columns = {column for example in examples for column in example.record}
    found = []
    for reward in task.rewards:
        if any(isinstance(node, ast.FunctionDef) and _only_raises(node) for node in _source(_plain(reward)).body):
            found.append(f"task.name = {name!r}: reward {reward.name!r} is not written yet: it only raises; write it")
        for column in sorted(set(_needed(reward))):
            without = [example.id for example in examples if column not in example.record]
            if not without:
                continue
            near = suggest_nearest(column, sorted(columns - {"prompt", column}) or ["prompt"])
            lack = "the data does not have" if column not in columns else f"{_some(without)} do not have"
            found.append(
                f"task.name = {name!r}: reward {reward.name!r} names the column {column!r}, which {lack}; {near}"
            )
    return found


def _some(ids: Sequence[str]) -> str:
    return f"{len(ids)} of the rows ({', '.join(ids[:3])}{', …' if len(ids) > 3 else ''})"


def _needed(reward: Reward) -> Iterator[str]:
    """Yield the columns that a function cannot do without, as far as its source tells."""
    function = _plain(reward)
    if reward.trl:
        for one in inspect.signature(reward.function).parameters.values():
            if one.kind is not one.VAR_KEYWORD and one.default is one.empty and one.name not in OF_TRL:
                yield one.name
    parameters = list(inspect.signature(function).parameters.values())
    mapping = next((one.name for one in parameters if one.kind is one.VAR_KEYWORD), None) if reward.trl else (
        parameters[1].name if len(parameters) > 1 else None
    )  # fmt: skip
    for node in ast.walk(_source(function)):
        match node:
            case ast.Subscript(ast.Name(id=name), ast.Constant(value=str(column)), ast.Load()) if name == mapping:
                yield column


def _plain(reward: Reward) -> Callable[..., object]:
    """Return the function itself, without partials and wrappers."""
    function: Callable[..., object] = inspect.unwrap(getattr(reward.function, "func", reward.function))
    return function


def _source(function: Callable[..., object]) -> ast.Module:
    """Return the syntax tree of a function; an empty one for a builtin, or a function without a source."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return ast.Module([], [])


def _only_raises(function: ast.FunctionDef) -> bool:
    return isinstance(function.body[-1], ast.Raise) and all(isinstance(one, ast.Expr) for one in function.body[:-1])


def check_own_parts(config: Config) -> list[str]:
    """Load every part of your own and check that it takes its arguments."""
    found = []
    for setting, reference in config.own_parts:
        try:
            if problem := _own_part_problem(setting, load_own(reference)):
                found.append(f"{setting} = {reference!r} {problem}")
        except OwnPartError as error:
            found.append(f"{setting} = {reference!r}: {error}")
    return found


def _own_part_problem(setting: str, part: object) -> str:
    if setting == "objective.preset":
        return "" if isinstance(part, Objective) else f"is a {type(part).__name__}, not an Objective"
    call, arguments = part, TAKES[setting]
    if setting == "sync.cadence":
        try:
            call = getattr(part() if inspect.isclass(part) else part, "due", None)
        except TypeError as error:
            return f"cannot be made without arguments ({error}); give its fields defaults, or name an object of it"
    if not callable(call):
        method = "has no method due" if setting == "sync.cadence" else f"is {part!r:.40}, not a function"
        return f"{method}; it is called with ({', '.join(arguments)})"
    try:
        inspect.signature(call).bind(*arguments)
    except TypeError as error:
        return f"cannot be called with ({', '.join(arguments)}): {error}"
    except ValueError:
        pass  # a function of C does not say what it takes
    return ""
