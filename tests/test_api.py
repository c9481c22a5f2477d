"""The public API: light to import, complete, documented, and the README's script runs."""

import subprocess
import sys
from pathlib import Path

import pytest

import offbeat
from offbeat.errors import OffbeatError
from offbeat.run.journal import read

ROOT = Path(__file__).parent.parent


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_offbeat_loads_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "numpy", "pydantic", "lance", "ray")
    assert python(f"import sys, offbeat; print([name for name in {heavy} if name in sys.modules])") == "[]"


def test_every_public_name_loads_and_stands_on_the_api_page() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    for name in offbeat.__all__:
        assert getattr(offbeat, name) is not None
        assert f"{name}" in page, f"{name} is not on the page"


def test_functions_are_not_hidden_by_modules_of_the_same_name() -> None:
    code = (
        "import offbeat, pkgutil, importlib\n"
        "for found in pkgutil.iter_modules(offbeat.__path__): importlib.import_module(f'offbeat.{found.name}')\n"
        "print([name for name in offbeat.__all__ if type(getattr(offbeat, name)).__name__ == 'module'])"
    )
    assert python(code) == "[]"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        offbeat.trian  # noqa: B018


def test_a_configuration_comes_from_a_path_a_dictionary_or_keywords(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("steps = 50\n\n[sync]\nevery = 4\n")
    data = {"steps": 50, "sync": {"every": 4}}
    loaded = offbeat.load_config(file)
    assert loaded == offbeat.load_config(data) == offbeat.load_config(**data) == offbeat.load_config(loaded)
    assert offbeat.load_config(file, sync={"drift_budget": 0.1}).sync.every == 4
    assert offbeat.load_config(file, model={"path": tmp_path}).model.path == str(tmp_path)


def test_keywords_take_the_names_of_settings_and_of_trl_where_the_meaning_is_the_same() -> None:
    given = offbeat.load_config(
        num_generations=4, learning_rate=1e-5, max_completion_length=64, beta=0.1, sync={"every": 2}
    )
    assert (given.group_size, given.optimizer.learning_rate, given.sampling.max_tokens) == (4, 1e-5, 64)
    assert (given.objective.kl_coefficient, given.sync.every) == (0.1, 2)
    with pytest.raises(offbeat.ConfigError, match=r"did you mean 'objective\.clip'"):
        offbeat.load_config(epsilon=0.2)


def test_problems_come_at_once_and_with_the_line_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("steps = 50\ngroup_sise = 8\n\n[sync]\nevery = 0\n")
    with pytest.raises(offbeat.ConfigError) as raised:
        offbeat.load_config(file)
    assert sorted(problem.split(":")[1] for problem in raised.value.problems) == ["2", "5"]
    assert isinstance(raised.value, OffbeatError)


def test_train_checks_everything_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(offbeat.ConfigError, match=r"model\.path"):
        offbeat.train(model={"path": str(tmp_path / "none")}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def right(text: str, columns: dict[str, str]) -> float:
    return float(text == columns["answer"])


@pytest.mark.parametrize(
    ("rows", "says"), [([], "no rows"), ([{"prompt": "1+1="}], "'answer'"), ([{"prompt": "1", "answer": {1}}], "row 0")]
)
def test_a_run_that_cannot_start_leaves_nothing_behind(rows: list[dict], says: str, tmp_path: Path) -> None:
    with pytest.raises(OffbeatError, match=says):
        offbeat.train(tmp_path / "no-model", right, rows, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_directory_without_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(OffbeatError, match="nowhere holds no run; give the directory"):
        offbeat.Run(tmp_path / "nowhere")


def test_the_readme_shows_the_script_that_is_run() -> None:
    script = (ROOT / "examples" / "first_run.py").read_text(encoding="utf-8").partition("\n\n")[2]
    assert f"```python\n{script}```" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert len([line for line in script.splitlines() if line]) <= 12


@pytest.mark.engine
def test_the_readmes_script_trains_and_plots(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "first_run.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    rewards = offbeat.Run(tmp_path / "sums").metrics["reward_mean"]
    assert rewards.tail(5).mean() > rewards.head(5).mean() + 0.2
    assert "<svg" in (tmp_path / "curve.svg").read_text()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return offbeat.tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.engine
def test_training_works_inside_a_running_event_loop(model: Path, tmp_path: Path) -> None:
    import asyncio

    async def notebook_cell() -> "offbeat.Run":
        return offbeat.train(
            model={"path": model, "compute": "float32", "serve": "float32"},
            task={"name": "arithmetic", "options": {"digits": 1}},
            engine={"kind": "hf"},
            sampling={"max_tokens": 4},
            steps=2,
            prompts_per_step=4,
            group_size=4,
            out=tmp_path / "run",
        )

    assert asyncio.run(notebook_cell()).state == "finished"


@pytest.mark.engine
def test_a_run_records_that_a_known_loss_was_accepted_and_resume_keeps_it(model: Path, tmp_path: Path) -> None:
    asked = {
        "model": {"path": str(model), "compute": "float32", "serve": "float32"}, "engine": {"kind": "hf"}, "steps": 2,
        "prompts_per_step": 4, "group_size": 4, "sampling": {"max_tokens": 4}, "sync": {"every": 2},
        "objective": {"preset": "reinforce"}, "task": {"options": {"digits": 1}},
    }  # fmt: skip
    with pytest.raises(OffbeatError, match="known to lose"):
        offbeat.train(asked, out=tmp_path / "run")
    run = offbeat.train(asked, accept=True, out=tmp_path / "run", progress=False)
    assert "which is known to lose" in offbeat.check(asked, accept=True)
    again = offbeat.resume(run, steps=3, progress=False)
    (event,) = (event for event in read(again.path / "events.jsonl") if event["kind"] == "evidence")
    assert event["level"] == "known to lose" and event["row"] == "evidence.a.sums.reinforce-v5"
    assert again.config.accept and "reinforce" in str(event["why"])


@pytest.mark.engine
def test_a_notebook_shows_progress_in_place(model: Path, tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    cell = f"""
import offbeat
run = offbeat.train(
    model={{"path": {str(model)!r}, "compute": "float32", "serve": "float32"}},
    task={{"name": "arithmetic", "options": {{"digits": 1}}}}, engine={{"kind": "hf"}}, sampling={{"max_tokens": 4}},
    steps=3, prompts_per_step=4, group_size=4, out={str(tmp_path / "run")!r},
)
run.metrics.index.tolist()
"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    outputs = notebook.cells[0].outputs
    shown = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert len(shown) == 1 and "3 of 3" in shown[0]
    assert outputs[-1].data["text/plain"] == "[1, 2, 3]"
