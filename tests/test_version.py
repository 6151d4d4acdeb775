"""The library's version: told in one place, the same as that of what is installed, and without loading much."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from importlib import metadata

import pytest
import torch

from elastic_ext.agent.arguments import parse
from elastic_ext.version import VERSION
from tests.support.masters import ROOT


def test_it_is_that_of_what_is_installed() -> None:
    assert metadata.version("elastic-ext") == VERSION and re.fullmatch(r"\d+\.\d+\.\d+", VERSION)


def test_it_is_written_in_one_place() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert setup["metadata"]["version"] == "attr: elastic_ext.version.VERSION"


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
