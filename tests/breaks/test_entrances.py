"""Numbers that no statistic can hold, and files and requests that no command may follow: all refused in a sentence."""

import http.client
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from offbeat.experience.feedback import LateScore
from offbeat.experience.log import ExperienceLog
from offbeat.experience.reader import LogReader
from offbeat.experience.schema import SCORES
from offbeat.types import Completion, Group, Prompt, Score, VersionSpan


def group(name: str, *rewards: float | None, logprob: float = -0.5) -> Group:
    answers = tuple(
        Completion(
            f"{name}/{i}",
            [4, 2],
            [logprob, -0.1],
            (VersionSpan(0, 0, 2),),
            score=None if reward is None else Score(reward),
        )
        for i, reward in enumerate(rewards)
    )
    return Group(name, Prompt(name, [1, 2], "sums"), answers)


def write_late_score(log: ExperienceLog, group_id: str, completion_id: str, reward: float) -> None:
    """Append a late score as an earlier release wrote it, whatever its value."""
    row = {"group_id": [group_id], "completion_id": [completion_id], "reward": [reward], "unscorable": [None]}
    row |= {"detail": [None], "breakdown": [None], "scored_at": [1.0], "scorer": ["ann"]}
    log.tables.scores.append(pa.table(row, schema=SCORES))


def offbeat(*arguments: str | Path, seconds: float = 25) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "offbeat", *map(str, arguments)]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        pytest.fail(f"offbeat {' '.join(map(str, arguments))} hung for {seconds:g} s")


@pytest.mark.parametrize("reward", [-1e200, 1e300, 1.7e308, 1e30])
def test_a_late_score_out_of_bounds_is_refused_with_its_value(tmp_path: Path, reward: float) -> None:
    with ExperienceLog.open(tmp_path / "log") as log:
        log.append([group("g0", 1.0, None)])
        refused = [one.refusal.detail for one in log.score([LateScore("g0", "g0/1", Score(reward))]).refused]
        assert len(refused) == 1 and "g0/1" in refused[0] and repr(reward)[:20] in refused[0]
        assert log.index_since(None)[0].ripe.tolist() == [False]


@pytest.mark.parametrize("reward", [-1e200, 1e160, 1e30])
def test_a_log_with_a_bad_late_score_stays_readable_and_a_correction_rescues_its_group(
    tmp_path: Path, reward: float
) -> None:
    with ExperienceLog.open(tmp_path / "log") as log:
        log.append([group("g0", 1.0, None), group("g1", 1.0, 0.0)])
        write_late_score(log, "g0", "g0/1", reward)
        try:
            rows, _ = log.index_since(None)
        except OverflowError as error:
            pytest.fail(f"a bad late score makes the log unreadable: {error}")
        assert rows.ripe.tolist() == [False, True] and np.isfinite(rows.reward_std).all()
        fate = log.ledger().fates["g0"]
        assert fate.fate == "quarantined" and f"{reward:g}" in fate.cause
        assert [one.completion.id for one in log.pending()] == ["g0/1"]
        assert log.feedback([{"completion_id": "g0/1", "score": 0.5}], replace=True).refused.total() == 0
        assert log.index_since(None)[0].ripe.tolist() == [True, True]
        assert log.ledger().fates["g0"].fate == "waiting"


def test_a_group_with_a_reward_or_log_prob_out_of_bounds_is_refused_with_its_value(tmp_path: Path) -> None:
    with ExperienceLog.open(tmp_path / "log") as log:
        receipt = log.append([group("g0", 1e100, 0.0), group("g1", 1.0, 0.0, logprob=-1e30), group("g2", 1.0, 0.0)])
        assert [one.group_id for one in receipt.refused] == ["g0", "g1"]
        details = [one.refusal.detail for one in receipt.refused]
        assert "g0/0" in details[0] and "1e+100" in details[0] and "-1e+30" in details[1]


def test_a_file_with_a_reward_out_of_bounds_imports_its_other_rows(tmp_path: Path) -> None:
    rows = [{"prompt_ids": [1, 2], "completion_ids": [[4, 2], [4, 3]], "rewards": [1.0, x]} for x in (0.0, -1e200)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    into = tmp_path / "log"
    done = offbeat("import", tmp_path / "rows.jsonl", "--into", into, "--task", "sums", "--source", "human")
    assert done.returncode == 0 and "-1e+200" in done.stdout + done.stderr, done.stderr
    assert len(LogReader.open(into).index_since(None)[0]) == 1


def a_run(place: Path) -> Path:
    """Return a directory with what the commands read first of a run."""
    from offbeat.config import parse

    config = parse({"model": {"path": "m"}, "task": {"name": "arithmetic"}})
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
    (place / "environment.json").write_text('{"run": "81f30d94"}')
    (place / "events.jsonl").write_text(json.dumps({"at": 1.0, "step": 0, "kind": "started"}) + "\n")
    with ExperienceLog.open(place / "experience") as log:
        log.append([group("g-0", 1.0, 0.0)])
    return place


@pytest.mark.parametrize("name", ["events.jsonl", "config.json"])
@pytest.mark.parametrize("command", ["report", "view", "fsck", "resume"])
def test_a_fifo_in_a_run_directory_ends_a_command_with_a_sentence(tmp_path: Path, command: str, name: str) -> None:
    run = a_run(tmp_path / "run")
    (run / name).unlink()
    os.mkfifo(run / name)
    done = offbeat(command, run)
    assert done.returncode and name in done.stdout + done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_report_does_not_follow_a_link_out_of_its_run(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    (run / "events.jsonl").rename(tmp_path / "private")
    (run / "events.jsonl").symlink_to(tmp_path / "private")
    done = offbeat("report", run)
    assert done.returncode and "events.jsonl" in done.stderr and not (run / "report.html").exists()


def test_a_configuration_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    with (run / "config.json").open("w") as file:
        file.truncate(10 << 30)
    limited = [sys.executable, "-c", "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30));"
               "from offbeat.cli.main import main; sys.argv = ['offbeat', 'report', sys.argv[1]]; main()"]  # fmt: skip
    done = subprocess.run([*limited, str(run)], capture_output=True, text=True, timeout=60)
    assert done.returncode and "MiB" in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_looking_at_a_lock_never_keeps_a_run_from_starting(tmp_path: Path) -> None:
    from offbeat.storage.files import FileLock, LockHeld, held_by

    path, ended, refused = tmp_path / "driver.lock", threading.Event(), 0
    FileLock(path).release()

    def look() -> None:
        while not ended.is_set():
            held_by(path)

    watchers = [threading.Thread(target=look) for _ in range(2)]
    for one in watchers:
        one.start()
    until = time.monotonic() + 3
    while time.monotonic() < until and not refused:
        try:
            FileLock(path).release()
        except LockHeld:
            refused += 1
    ended.set()
    for one in watchers:
        one.join()
    assert not refused
    lock = FileLock(path)
    assert held_by(path) == f"process {os.getpid()} on {os.uname().nodename}"
    lock.release()
    assert held_by(path) is None


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "DELETE", "OPTIONS", "<b>"])
def test_every_answer_of_the_live_report_has_a_policy_and_is_no_html_of_others(tmp_path: Path, method: str) -> None:
    from offbeat.reports.serve import ReportServer, ReportSource

    run = tmp_path / "<img src=x onerror=alert(1)>"
    run.mkdir()
    with ReportServer(ReportSource([run])) as server:
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        for path in ("/", f"/{server.token}/", f"/{server.token}/part", "/<script>"):
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
            connection.request(method, path.replace("<", "%3C") if method == "GET" else path)
            answer = connection.getresponse()
            body = answer.read().decode()
            assert answer.status >= 400 and (method in ("GET", "HEAD") or answer.status == 405), answer.status
            assert str(answer.headers["Content-Security-Policy"]).startswith("default-src 'none'")
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert "text/plain" in answer.headers["Content-Type"] or "<img" not in body
            connection.close()
        server.shutdown()
        serving.join()


@pytest.mark.engine
@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set n = namespace(s='xxxxxxxx') %}{% for a in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    ],
    ids=["that never ends", "that builds gigabytes"],
)
def test_a_chat_template_ends_in_a_sentence(tmp_path: Path, template: str) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "<e>": 2}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<e>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    row = {"prompt": [{"role": "user", "content": "ab"}], "completion": "b", "reward": 1.0}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    words = ["import", tmp_path / "rows.jsonl", "--into", tmp_path / "log", "--task", "sums", "--source", "human"]
    code = f"import resource, sys; resource.setrlimit(resource.RLIMIT_AS, ({12 << 30}, {12 << 30}));"
    code += "from offbeat.cli.main import main; sys.argv[0] = 'offbeat'; main()"
    command = [sys.executable, "-c", code, *map(str, words), "--tokenizer", str(tmp_path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=40)
    except subprocess.TimeoutExpired:
        pytest.fail("the import hung")
    assert done.returncode and "chat template" in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_model_of_a_billion_layers_is_refused_before_it_is_built(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from offbeat.hub import model_problems

    save_file({"x": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "text_config": {"num_hidden_layers": 1000000000}}')
    assert ["num_hidden_layers = 1000000000" in problem for problem in model_problems(tmp_path)] == [True]


@pytest.mark.engine
def test_rows_nested_too_deeply_are_refused_one_by_one(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    with (run / "events.jsonl").open("a") as lines:
        lines.write("[" * 500_000 + "\n")
    done = offbeat("fsck", run, seconds=90)
    assert "Traceback" not in done.stderr and "1 of 2 lines are no events" in done.stdout, done.stderr


def test_what_a_reward_function_prints_does_not_fill_a_disk(tmp_path: Path) -> None:
    (tmp_path / "shouting.py").write_text("def shout(text, columns):\n    print(text * 1_000_000)\n    return 1.0\n")
    code = """
from offbeat.scoring.pool import ScoringPool
from offbeat.tasks.rewards import Reward
from shouting import shout
if __name__ == "__main__":
    with ScoringPool([Reward(shout)], (0.0, 1.0), workers=2) as pool:
        scores = pool.score_all([("0123456789", {})] * 20)
        assert [one.reward for one in scores] == [1.0] * 20, scores
"""
    (tmp_path / "main.py").write_text(code)
    with (tmp_path / "printed").open("wb") as printed:
        done = subprocess.run([sys.executable, "main.py"], cwd=tmp_path, stdout=printed, stderr=printed, timeout=60)
    assert done.returncode == 0, (tmp_path / "printed").read_bytes()[-2000:]
    assert (tmp_path / "printed").stat().st_size < 50e6
