"""The workflows and issue forms of .github: they are read, and what they call is there. GitHub's own validation, which
alone knows what it takes, is not repeated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
KINDS = frozenset({"checkboxes", "dropdown", "input", "markdown", "textarea"})
"""What a form may ask with."""

each_form = pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)


def steps() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every step of every job, with the name of its workflow."""
    for path in WORKFLOWS:
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            assert job["timeout-minutes"] > 0, f"a job of {path.name} may run for ever"
            yield from ((path.stem, step) for step in job["steps"])


def targets() -> set[str]:
    """What the Makefile can make by name."""
    (phony,) = re.findall(r"(?m)^\.PHONY: (.*)$", (ROOT / "Makefile").read_text().replace("\\\n", ""))
    return set(phony.split())


def test_what_workflows_run_is_there() -> None:
    run = [(name, step["run"]) for name, step in steps() if "run" in step]
    made = {(name, target) for name, text in run for target in re.findall(r"\bmake (?:-C \S+ )?([\w-]+)", text)}
    assert {target for _, target in made} <= targets()
    assert {("tests", "test-torch"), ("tests", "test-wheel"), ("docs", "docs"), ("publish", "test-wheel")} <= made
    scripts = {text for _, text in run if text.startswith(".ci/")}
    assert scripts == {".ci/run"} and (ROOT / ".ci" / "run").stat().st_mode & 0o100


def test_the_matrix_has_the_lowest_torch_that_is_installed_and_the_newest() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
    lowest, newest = jobs["torch"]["strategy"]["matrix"]["torch"]
    assert newest == "newest"
    assert f"torch>={lowest.removesuffix('.0')}," in (ROOT / "setup.cfg").read_text()


def test_what_publishes_has_no_token_and_takes_what_was_tested() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "publish.yml").read_text())["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"} and jobs["publish"]["needs"] == "make"
    names = {
        step["with"]["name"] for job in jobs.values() for step in job["steps"] if "artifact@" in step.get("uses", "")
    }
    assert names == {"release"}
    assert not [step for _, step in steps() if "secrets." in str(step)]


@each_form
def test_a_form_asks_questions_that_it_can_ask(form: Path) -> None:
    said = yaml.safe_load(form.read_text())
    assert said["name"] and said["description"]
    asked = [each for each in said["body"] if each["type"] != "markdown"]
    assert asked and {each["type"] for each in said["body"]} <= KINDS
    assert len({each["id"] for each in asked}) == len({each["attributes"]["label"] for each in asked}) == len(asked)
    assert any(each.get("validations", {}).get("required") for each in asked)


@each_form
def test_a_form_names_commands_and_pages_that_there_are(form: Path) -> None:
    text = form.read_text()
    pages = set(re.findall(r"[\w/]+\.md", text))
    assert pages and all((ROOT / page).is_file() for page in pages)
    from elastic_ext.cli import main

    for command in set(re.findall(r"`elastic-ext ([\w -]+)`", text)):
        with pytest.raises(SystemExit) as ended:
            main([*command.split(), *([] if command.startswith("--") else ["--help"])])
        assert ended.value.code == 0, command
