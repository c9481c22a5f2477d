"""`offbeat import` and `offbeat log`: they print what is there, write only what they report, and match the docs."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from offbeat.cli.main import app
from offbeat.experience.feedback import LateScore
from offbeat.experience.ledger import LedgerEvent, LedgerEventKind
from offbeat.experience.log import ExperienceLog
from offbeat.experience.validation import RefusalReason
from offbeat.types import UNKNOWN, Completion, Group, Prompt, Score
from tests.fixtures.groups import make_group, without_scores

DOCS = Path(__file__).parent.parent.parent / "docs"


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A tokenizer with one token for each byte, an end token and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>")
    wrapped.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
        "{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    )
    wrapped.save_pretrained(tmp_path / "my-model")
    return tmp_path / "my-model"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A log with groups trained, waiting, unripe and refused."""
    with ExperienceLog.open(tmp_path / "log") as log:
        log.append(
            [*(make_group(i) for i in range(4)), without_scores(make_group(64)), Group("", make_group(0).prompt, ())]
        )
        log.score([LateScore("g64", "g64/0", Score(1.0))])
        log.record(
            [LedgerEvent("g0", LedgerEventKind.TRAINED, step=1), LedgerEvent("g0", LedgerEventKind.TRAINED, step=5)]
        )
        log.record([LedgerEvent("g1", LedgerEventKind.EXPIRED, step=3, cause="lag")])
    return tmp_path / "log"


def files(place: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in place.rglob("*")}


@pytest.mark.parametrize(
    "command",
    [
        *("import --help", "feedback --help", "log --help", "log stats --help", "log fates --help", "log show --help"),
        *("log pending --help", "log export --help"),
    ],
)
def test_help_shows_an_example_and_imports_nothing_heavy(command: str) -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'lance', 'pyarrow', 'transformers', 'datasets', 'jinja2'): sys.modules[name] = None\n"
        f"from offbeat.cli.main import app; app({command.split()!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert command == "log --help" or f"offbeat {command.removesuffix(' --help')} " in " ".join(done.stdout.split())


def test_stats_count_what_is_there(place: Path) -> None:
    printed = run("log", "stats", place).output
    assert "5 groups, 40 completions, 33 scored" in printed
    assert "7 completions without a reward; 1 groups wait for feedback" in printed
    assert "arithmetic: 5 groups" in printed and "policy: 5 groups" in printed
    assert "  0: 4 groups" in printed and "  1: 1 groups" in printed
    assert "quarantined: 1\n  id: 1" in printed and "MB on disk, 1 late scores" in printed


def test_fates_balance_or_the_command_fails(place: Path) -> None:
    result = run("log", "fates", place)
    assert result.exit_code == 0
    assert "6 generated = 1 trained + 3 waiting + 2 dropped (1 expired, 1 quarantined) + 0 in flight" in result.output
    assert "2 uses in training" in result.output
    with ExperienceLog.open(place) as log:
        log.record([LedgerEvent("never-seen\x1b[2J", LedgerEventKind.TRAINED, step=9)])
    result = run("log", "fates", place)
    assert result.exit_code == 1 and "never appended" in result.output and "\x1b" not in result.output


def test_a_group_is_shown_with_its_fate(place: Path) -> None:
    printed = run("log", "show", place, "g0").output
    assert "group g0" in printed and "trained at steps 1, 5" in printed and printed.count("reward") == 8
    assert "expired (lag)" in run("log", "show", place, "g1").output
    printed = run("log", "show", place, "g64").output
    assert printed.count("waiting for feedback") == 7 and "waiting" in printed
    assert run("log", "show", place, "--first", 2).output.count("group g") == 2
    missing = run("log", "show", place, "g99")
    assert missing.exit_code == 1 and "there is no group 'g99'" in missing.output


def test_model_output_cannot_control_the_terminal(tmp_path: Path, tokenizer: Path) -> None:
    text = "\x1b[2Jgone\u202e\r\nnext"
    prompt = Prompt("p\x1b[1m", [1], "task\x07", {"hint": "\x9b31m"})
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(tokenizer).encode(text)
    answer = Completion("g/\x1b0", ids, UNKNOWN, source="human\x1b")
    with ExperienceLog.open(tmp_path / "log") as log:
        assert log.append([Group("g\x1b[0m", prompt, (answer,))]).accepted
    for command in ("show", "stats", "fates", "pending"):
        extra = ["--tokenizer", tokenizer] if command in ("show", "pending") else []
        result = run("log", command, tmp_path / "log", *extra)
        assert result.exit_code == 0 and not set(result.output) & set("\x1b\x07\x9b\u202e\r")
    shown = run("log", "show", tmp_path / "log", "--tokenizer", tokenizer).output
    assert r"\x1b[2Jgone\u202e\r" in shown and "      next" in shown


@pytest.mark.parametrize("command", ["stats", "fates", "show", "pending"])
def test_reading_a_missing_log_does_not_create_one(tmp_path: Path, command: str) -> None:
    result = run("log", command, tmp_path / "nothing")
    assert result.exit_code == 1 and "there is no experience log" in result.output
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("name", ["groups.jsonl", "groups.parquet"])
def test_an_export_can_be_imported_into_another_log(place: Path, tmp_path: Path, name: str) -> None:
    assert "5 groups written" in run("log", "export", place, tmp_path / name).output
    assert run("log", "export", place, tmp_path / name).exit_code == 1
    printed = run("import", tmp_path / name, "--into", tmp_path / "other").output
    assert "rows exported from an experience log" in printed and "imported     5 groups, 40 completions" in printed
    with ExperienceLog.open(place) as one, ExperienceLog.open(tmp_path / "other") as other:
        assert list(one.groups()) == list(other.groups())


@pytest.mark.parametrize("name", ["groups.jsonl", "groups.parquet"])
def test_an_export_has_text_where_the_tokenizer_is_known(tmp_path: Path, tokenizer: Path, name: str) -> None:
    from offbeat.tasks.data import rows

    letters = json.loads((tokenizer / "tokenizer.json").read_text())["model"]["vocab"]
    with ExperienceLog.open(tmp_path / "text") as log:
        ids = [[letters[letter] for letter in text] for text in ("2+2=", "4")]
        answer = Completion("g0/0", [*ids[1], 256], UNKNOWN, source="human", score=Score(1.0))
        log.append([Group("g0", Prompt("p0", ids[0], "sums"), (answer,))])
    done = run("log", "export", tmp_path / "text", tmp_path / name, "--tokenizer", tokenizer)
    [row] = rows(tmp_path / name)
    assert done.exit_code == 0 and (row["prompt"], row["completion"]) == ("2+2=", "4"), done.output
    without = run("log", "export", tmp_path / "text", tmp_path / f"ids-{name}")
    assert "as token ids; for text too, give --tokenizer" in without.output
    assert "imported     1 groups" in run("import", tmp_path / name, "--into", tmp_path / "again").output


def test_groups_are_named_after_the_file_if_no_task_is_given(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": [1], "responses": [[2], [3]], "rewards": [1, 0]}\n')
    result = run("import", file, "--into", tmp_path / "log", "--source", "human", "--reward-range", "0,1")
    assert result.exit_code == 0 and "as those of task mine" in result.output
    assert "mine: 1 groups" in run("log", "stats", tmp_path / "log").output
    rated = run("eval", tmp_path / "log")
    assert rated.exit_code == 0 and "0.500" in rated.output, rated.output


def test_the_help_of_import_names_the_columns_that_it_finds() -> None:
    from offbeat.experience.importing.layout import ID_NAMES, ROLES

    text = run("import", "--help").output
    listed = text[text.index("Columns are found by name:") : text.index("For other names")]
    named = set(re.findall(r"[a-z]+(?:_[a-z]+)*", listed.replace("│", " ")))
    found = {name for names in (*ROLES.values(), *ID_NAMES.values()) for name in names}
    columns = {name for name in named if "_" in name} | (named & {"prompt", "question", "response", "reward", "score"})
    assert columns <= found and len(columns) > 8, columns - found


def test_a_dry_run_writes_nothing_and_creates_no_log(place: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": [1], "responses": [[2], [3]], "rewards": [1, 9]}\n{"prompt": [4]}\n')
    options = ["--task", "t", "--source", "human", "--reward-range", "0,1", "--dry-run"]
    before = files(place)
    for into in (place, tmp_path / "nothing"):
        result = run("import", rows, "--into", into, *options)
        assert "quarantined  2" in result.output and "nothing was written" in result.output
        assert "reward-range: 1" in result.output and "unreadable: 1" in result.output
        assert result.exit_code == 1 and "most of" in result.output
    assert files(place) == before and not (tmp_path / "nothing").exists()


def test_text_needs_a_tokenizer_and_chat_its_template(tmp_path: Path, tokenizer: Path) -> None:
    rows, into = tmp_path / "rows.jsonl", tmp_path / "log"
    asked = [{"role": "user", "content": "2+2="}]
    refused = [{"role": "system", "content": "be brief"}, *asked]
    conversations = [{"prompt": prompt, "responses": ["4", "5"], "rewards": [1, 0]} for prompt in (asked, refused)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in conversations))
    options = ["--into", into, "--task", "t", "--source", "human"]
    without = run("import", rows, *options)
    assert without.exit_code == 1 and "text needs the policy's tokenizer" in without.output
    result = run("import", rows, *options, "--tokenizer", tokenizer)
    assert result.exit_code == 0 and "imported     1 groups" in result.output
    assert "the chat template refuses the prompt: no system here" in result.output
    shown = run("log", "show", into, "--tokenizer", tokenizer).output
    assert "user: 2+2=\n    assistant: \n" in shown and "4<end>" in shown
    rows.write_text('{"prompt": "2+2=", "responses": ["4", "5"], "rewards": [1, 0]}\n')
    result = run("import", rows, *options, "--tokenizer", tokenizer, "--chat")
    assert result.exit_code == 0 and "skipped      1 groups" in result.output  # the same prompt in another form


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--reward-range", "0"], "two numbers like 0,1"),
        (["--reward-range", "0,1", "--columns", "task=of"], "give its name with --task"),
        (["--columns", "promt=q"], "did you mean 'prompt'?"),
        (["--tokenizer", "nowhere"], "is not a directory"),
        (["--task", "t"], "the rows have no source"),
    ],
)
def test_a_wrong_option_gives_a_message(tmp_path: Path, options: list[str], message: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": [1], "responses": [[2]], "of": "t"}\n')
    result = run("import", tmp_path / "rows.jsonl", "--into", tmp_path / "log", *options)
    assert result.exit_code in (1, 2) and message in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_the_docs_list_every_reason_for_refusal() -> None:
    page = (DOCS / "reference" / "experience-log.md").read_text(encoding="utf-8")
    listed = page.partition("## Reasons for refusal")[2].partition("\n## ")[0]
    assert re.findall(r"^- `([\w-]+)`: ", listed, re.MULTILINE) == [reason.value for reason in RefusalReason]


@pytest.mark.parametrize(
    ("name", "least_commands", "least_compared"),
    [("import-completions", 1, 1), ("inspect-the-log", 8, 0), ("late-feedback", 4, 2)],
)
def test_commands_in_the_docs_print_what_is_shown(
    name: str,
    least_commands: int,
    least_compared: int,
    tmp_path: Path,
    tokenizer: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All blocks in order: Python and commands run, and text after a command is what it printed."""
    monkeypatch.chdir(tmp_path)
    page = DOCS / "how-to" / f"{name}.md"
    namespace: dict[str, object] = {"__name__": "docs"}
    printed, commands, compared = "", 0, 0
    for language, block in re.findall(r"```(\w+)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        if language == "python":
            exec(compile(block, str(page), "exec"), namespace)
        elif language == "bash":
            for line in block.replace("\\\n", " ").splitlines():
                program, *arguments = shlex.split(line)
                result = run(*arguments)
                assert program == "offbeat" and result.exit_code == 0, f"{line}\n{result.output}"
                printed, commands = result.output, commands + 1
        else:
            assert language == "text" and block == printed
            compared += 1
    assert commands >= least_commands and compared >= least_compared
