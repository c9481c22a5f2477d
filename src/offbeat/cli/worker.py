"""`offbeat worker`: join a run from any machine that reaches its two logs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from offbeat.cli.task_option import Settings, TaskName, load_tokenizer, make_task
from offbeat.cli.terminal import plain_errors, printable

if TYPE_CHECKING:
    from offbeat.rollout.engine import Engine
    from offbeat.rollout.worker import Worker


def worker(
    run: Annotated[Path | None, typer.Option(help="A run on Ray: this machine joins its cluster")] = None,
    slots: Annotated[int, typer.Option(min=1, help="With --run: workers this machine has room for")] = 1,
    weights: Annotated[str, typer.Option(help="The run's weight log: a path or an object store's URI")] = "",
    experience: Annotated[str, typer.Option(help="The run's experience log: a path or URI")] = "",
    model: Annotated[Path | None, typer.Option(help="Directory of the model the run began with")] = None,
    task: TaskName = "",
    settings: Settings = None,
    name: Annotated[str, typer.Option(help="Unique among the run's workers; host and process id unless given")] = "",
    engine: Annotated[Literal["hf", "vllm"], typer.Option(help="transformers, or vLLM")] = "vllm",
    dtype: Annotated[str, typer.Option(help="What the engine computes in")] = "bfloat16",
    group_size: Annotated[int, typer.Option(min=2, help="G: completions of one prompt")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest completion")] = 256,
    max_prompt: Annotated[int, typer.Option(min=1, help="Longest prompt that vLLM makes room for")] = 1024,
    temperature: Annotated[float, typer.Option(min=0.01)] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the run; the worker's own order of prompts derives from its name")] = 0,
    at_once: Annotated[int, typer.Option(min=1, help="Groups in flight")] = 8,
    per_version: Annotated[int, typer.Option(min=0, help="Groups under one version before it waits; 0: no end")] = 0,
    groups: Annotated[int, typer.Option(min=0, help="Stop after so many; 0: when interrupted")] = 0,
    scorers: Annotated[int, typer.Option(min=1, help="Scoring processes")] = 2,
) -> None:
    """Generate, score and append groups: `offbeat worker --weights W --experience E --model M --task gsm8k`.

    With `--run runs/one` this machine becomes a node of the run's Ray cluster, and the run starts the workers.

    Otherwise the worker reads policies from the weight log, proves each by its probe before it writes a word with it,
    and appends to the experience log. It may join and leave at any time. Ctrl-C gives back what it has begun and ends.
    """
    import asyncio
    import os
    import socket

    from offbeat.experience.log import ExperienceLog
    from offbeat.rollout.engine import Sampling
    from offbeat.rollout.generation import GroupMaker
    from offbeat.rollout.prompt_leases import LocalPrompts, PerVersion, PromptLeases
    from offbeat.rollout.worker import Pace, Worker
    from offbeat.scoring.pool import ScoringPool
    from offbeat.seeds import derive
    from offbeat.tasks.data import prompt_at
    from offbeat.weights.subscriber import Subscription

    if run is not None:
        _join(run, slots)
    if not (weights and experience and model and task):
        raise typer.BadParameter("give --run, or all of --weights, --experience, --model and --task")
    called = name or f"{socket.gethostname()}-{os.getpid()}"
    chosen = make_task(task, settings)
    if chosen.environment is not None:
        raise typer.BadParameter(f"task {task!r} has several turns; a worker alone plays single turns only")
    tokenizer = load_tokenizer(model)
    if tokenizer.eos_token_id is None:
        raise typer.BadParameter(f"the tokenizer of {model} names no end-of-text token: completions would never stop")

    def decode(token_ids: object) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=True))

    pace = Pace(lanes=at_once) if engine == "vllm" else Pace(groups_per_call=at_once)
    with (
        plain_errors(),
        ExperienceLog.open(experience, writer=called) as log,
        ScoringPool.of(chosen, workers=scorers) as pool,
        Subscription.open(weights, name=called) as policies,
    ):
        order = prompt_at(chosen, tokenizer, derive(seed, "worker", called))
        desk = LocalPrompts(PromptLeases(order, name=f"{called}-{os.getpid()}", seed=seed, seconds=pace.call_seconds))
        limit = per_version or 1 << 62
        made = Worker(
            called,
            lambda: _start(engine, model, dtype, max_prompt + max_tokens, at_once * group_size),
            policies,
            PerVersion(desk, limit),
            GroupMaker(group_size, Sampling(max_tokens, (tokenizer.eos_token_id,), temperature), decode, pool),
            log,
            pace,
        )
        with plain_errors():
            asyncio.run(_work(made, groups))
        typer.echo(
            f"{made.tally.groups} groups, {made.tally.tokens} tokens, {made.tally.loads} versions loaded, "
            f"{made.tally.discarded} groups given back, {made.tally.starts} engine starts"
        )


def _join(run: Path, slots: int) -> NoReturn:
    """This process becomes Ray's, until it is interrupted."""
    import os

    from offbeat.run.directory import RunDirectory
    from offbeat.run.ray.entry import join_command

    with plain_errors():
        command = join_command(RunDirectory(run), slots)
    os.execvp(command[0], command)


async def _start(engine: str, model: Path, dtype: str, longest: int, sequences: int) -> "Engine":
    if engine == "hf":
        from offbeat.rollout.hf import HfEngine

        return HfEngine.start(model, dtype=dtype)
    from offbeat.rollout.vllm import VllmEngine

    return await VllmEngine.start(model, dtype=dtype, max_model_len=longest, max_num_seqs=sequences)


async def _work(worker: "Worker", groups: int) -> None:
    """Until interrupted, or until there are enough groups; says what goes wrong as it happens."""
    import asyncio
    import signal

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, worker.stop)
    running = asyncio.create_task(worker.run())
    told, version = 0, None
    while not running.done():
        await asyncio.wait([running], timeout=0.5)
        for notice in worker.tally.notices[told:]:
            typer.echo(printable(notice), err=True)
        told = len(worker.tally.notices)
        if worker.version != version and worker.version is not None:
            version = worker.version
            typer.echo(f"serving version {version}: {worker.verdict}")
        if groups and worker.tally.groups >= groups:
            worker.stop()
    await running
