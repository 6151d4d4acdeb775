"""Versions: the library's is told in one place, the same as that of what is installed, and without loading much. Which
versions of torch were tested is told in one place too, and bounds those that pip installs."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from importlib import metadata

import pytest
import torch

from elastic_ext.agent.arguments import parse
from elastic_ext.version import TESTED_TORCH, TESTED_TORCH_IN_WORDS, VERSION, why_torch_is_untested
from tests.support.masters import ROOT


@pytest.fixture(scope="module")
def setup() -> configparser.ConfigParser:
    """setup.cfg, where the package is described."""
    found = configparser.ConfigParser()
    found.read(ROOT / "setup.cfg")
    return found


def test_it_is_that_of_what_is_installed() -> None:
    assert metadata.version("elastic-ext") == VERSION and re.fullmatch(r"\d+\.\d+\.\d+", VERSION)


def test_it_is_written_in_one_place(setup: configparser.ConfigParser) -> None:
    assert setup["metadata"]["version"] == "attr: elastic_ext.version.VERSION"


def test_the_changelog_has_a_section_for_each_version_and_the_first_is_this_one() -> None:
    headings = re.findall(r"(?m)^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", each) for each in headings[1:])
    assert re.fullmatch(rf"Unreleased \({VERSION}\)|{VERSION} - \d{{4}}-\d\d-\d\d", headings[0])
    versions = [tuple(map(int, re.findall(r"\d+", each)[:3])) for each in headings]
    assert versions == sorted(set(versions), reverse=True)


# --- torch's --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tested", TESTED_TORCH)
def test_every_release_and_build_of_a_version_that_was_tested_counts_as_tested(tested: tuple[int, int]) -> None:
    version = ".".join(map(str, tested))
    for build in (version, f"{version}.1", f"{version}.0+cpu", f"{version}.0a0+git1234"):
        assert why_torch_is_untested(build) is None


@pytest.mark.parametrize("version", ["2.10.0", "2.12.1+cu130", "2.130.0", "3.0", "22.13", "nightly"])
def test_any_other_version_is_named_beside_those_that_were(version: str) -> None:
    expected = f"torch {version} was never tested with elastic_ext {VERSION}; tested: {TESTED_TORCH_IN_WORDS}"
    assert why_torch_is_untested(version) == expected


def test_what_pip_chooses_by_itself_is_a_torch_that_was_tested(setup: configparser.ConfigParser) -> None:
    lowest, (major, minor) = TESTED_TORCH[0], TESTED_TORCH[-1]
    assert f"torch>={lowest[0]}.{lowest[1]},<{major}.{minor + 1}" in setup["options"]["install_requires"].split("\n")
    assert re.search(rf"(?m)^torch=={major}\.{minor}\.", (ROOT / "constraints.txt").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["elastic_ext.cli"], f"elastic-ext {VERSION}"),
        (["elastic_ext.run"], f"elastic-run {VERSION}, torch {torch.__version__}"),
        (["elastic_ext.master"], f"elastic_ext.master {VERSION}"),
    ],
)
def test_each_command_tells_it(command: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command, "--version"], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert (done.returncode, done.stdout.strip()) == (0, said), done.stderr


def test_a_scripts_own_version_is_the_scripts() -> None:
    assert parse(["train.py", "--version"], {}).training_script_args == ["--version"]


def test_a_master_loads_nothing_that_looks_through_what_is_installed() -> None:
    code = "import sys, elastic_ext.master.process; print({'importlib.metadata', 'email', 'csv'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "set()"), done.stderr
