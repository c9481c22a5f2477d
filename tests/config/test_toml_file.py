"""The line number of each setting in its file, and how `--set` overrides it."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.config.parsing import TomlFile, load
from offbeat.errors import ConfigError

FILE = '''# a comment with key = 3
seed = 1  # and another
"quoted" = 2
a.b.c = 3

[sync]  # table
every = 10

text = """
every = 4
[model]
"""
[objective]
clip = [
  0.2,  # low

  0.3,
]
[task]
options = { digits = 2, "odd key" = { deep = 1 } }
'''


def lines(text: str) -> dict[str, int]:
    return TomlFile(Path("run.toml"), text, {}, frozenset()).lines()


def test_each_key_has_the_line_on_which_it_is_written() -> None:
    assert lines(FILE) == {
        "seed": 2,
        "quoted": 3,
        "a": 4,
        "a.b": 4,
        "a.b.c": 4,
        "sync": 6,
        "sync.every": 7,
        "sync.text": 9,
        "objective": 13,
        "objective.clip": 14,
        "task": 19,
        "task.options": 20,
        "task.options.digits": 20,
        "task.options.odd key": 20,
        "task.options.odd key.deep": 20,
    }


@given(st.lists(st.sampled_from(["", "# words = [", "k{} = 1", "k{} = [\n 1,\n 2]", "[t{}]", "k{} = '''\nx\n'''"])))
def test_every_key_is_found_on_its_own_line(pieces: list[str]) -> None:
    written = "\n".join(piece.format(number) for number, piece in enumerate(pieces))
    found = {key.rpartition(".")[2]: line for key, line in lines(written).items()}
    for name, line in found.items():
        assert written.split("\n")[line - 1].lstrip("[").startswith(name)
    assert len(found) == sum(piece[:1] in ("k", "[") for piece in pieces)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("sync.every=10", 10),
        ("sync.every = 10", 10),
        ("objective.preset=grpo", "grpo"),
        ('objective.preset="grpo"', "grpo"),
        ("objective.clip=[0.2, 0.3]", (0.2, 0.3)),
        ("task.options.digits=3", 3),
        ("model.path=a=b", "a=b"),
    ],
)
def test_a_setting_is_toml_or_else_text(setting: str, value: object, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[objective]\npreset = 'grpo'\n[task]\noptions = { digits = 1 }")
    found: object = load(file, [setting])
    for part in setting.split("=")[0].strip().split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    assert found == value


def test_problems_are_listed_in_the_order_of_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("steps = 0\nstps = 3\nseed = 1.5\n[sync]\nevry = 2")
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert [problem.split(":")[1] for problem in caught.value.problems] == ["1", "2", "3", "5"]


def test_a_later_setting_wins_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("steps = 5")
    assert load(file, ["steps=6", "steps=7"]).steps == 7
    with pytest.raises(ConfigError, match=r"--set sync: sync = 5 is not a table"):
        load(file, ["sync=5"])


def test_a_pipe_or_a_device_is_refused_and_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.toml")
    for place in (tmp_path / "run.toml", Path("/dev/zero")):
        with pytest.raises(ConfigError, match="is not a file"):
            TomlFile.read(place)
