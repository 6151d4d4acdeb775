"""Completion in a shell: a real bash, which has read the script that is printed, is asked what it would complete."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from elastic_ext.agent.arguments import parser as launcher_parser
from elastic_ext.cli import main
from elastic_ext.cli.completion import completed, script_for
from elastic_ext.records.run_dir import StartSettings

BASH = shutil.which("bash")
ASK = """
ask() {
    COMP_WORDS=("$@")
    COMP_CWORD=$(($# - 1))
    COMPREPLY=()
    "_${1//[^a-z]/_}"
    printf '%s ' "${COMPREPLY[@]}"
    printf '\\n'
}
"""
ASKED: Sequence[tuple[Sequence[str], Sequence[str]]] = [
    (["elastic-ext", "st"], ["status"]),
    (["elastic-ext", "config", "s"], ["show", "set", "schema"]),
    (["elastic-ext", "config", "show", "--f"], ["--file"]),
    (["elastic-ext", "config", "show", "--job", "nano", "--m"], ["--master"]),
    (["elastic-ext", "config", "show", "--job", "n"], ["nano", "nano-2"]),
    (["elastic-ext", "report", "--job", "=", ""], ["mini", "nano", "nano-2"]),
    (["elastic-ext", "run", "--job", "m"], ["mini"]),
    (["elastic-ext", "config", "set", "dataloader.n"], ["dataloader.num_workers="]),
    (["elastic-ext", "config", "set", "dataloader.num_workers", "=", "s"], []),
    (["elastic-ext", "config", "set", "vers"], []),
    (["elastic-ext", "ckpt", "export", "--dtype", ""], ["fp32", "fp16", "bf16"]),
    (["elastic-ext", "ckpt", "export", "--dtype", "=", "b"], ["bf16"]),
    (["elastic-ext", "ckpt", "export", "--dtype", "="], ["fp32", "fp16", "bf16"]),
    (["elastic-ext", "ckpt", "ls", "some/fol"], []),  # bash completes files by itself
    (["elastic-ext", "config", "show", "--file", "--"], []),
    (["elastic-ext", "status", "--watch", "--js"], ["--json"]),
    (["elastic-ext", "completion", "b"], ["bash"]),
    (["elastic-run", "--hang-"], ["--hang-seconds"]),
    (["elastic-run", "--standalone", "--tun"], ["--tuning"]),
    (["elastic-ext", "run", "--hang-"], ["--hang-seconds"]),
]
"""What is on a command line, the last word unfinished, and what it may become."""


@pytest.mark.skipif(BASH is None, reason="there is no bash")
def test_bash_completes_commands_options_and_values(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert BASH is not None
    assert main(["completion", "bash"]) == 0 and main(["completion", "bash", "elastic-run"]) == 0
    asked = "".join(f"ask {' '.join(repr(word) for word in words)}\n" for words, _ in ASKED)
    script = capsys.readouterr().out + ASK + asked + "complete -p elastic-ext elastic-run\n"
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for job in ("nano", "nano-2", "mini"):
        StartSettings.run_dir_of(environ, job).mkdir(parents=True)
    done = subprocess.run(
        [BASH, "--norc"], input=script, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and done.stderr == ""
    *found, ours, launchers = done.stdout.splitlines()
    assert [(words, line.split()) for (words, _), line in zip(ASKED, found, strict=True)] == list(map(tuple, ASKED))
    assert ours.split()[-3:] == ["-F", "_elastic_ext", "elastic-ext"] and "-o default" in ours
    assert launchers.split()[-3:] == ["-F", "_elastic_run", "elastic-run"]


def test_every_option_of_a_parser_is_completed() -> None:
    (only,) = completed(launcher_parser(), {})
    assert {"--standalone", "--nproc-per-node", "--tuning", "--help"} <= {*only.options}
    assert "--standalone" not in only.values and only.values["--tuning"] == ()
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("a", "b"))
    below = parser.add_subparsers()
    below.add_parser("one").add_argument("what", metavar="WHAT")
    top, one = completed(parser, {"WHAT": ["this", "that"]})
    assert (top.path, top.words, top.values) == ("", ("one",), {"--mode": ("a", "b")})
    assert (one.path, one.words, one.options) == ("/one", ("this", "that"), ("--help",))


def test_zsh_reads_the_script_of_bash() -> None:
    parser = argparse.ArgumentParser()
    scripts = {shell: script_for(shell, "p", list(completed(parser, {}))) for shell in ("bash", "zsh")}
    assert scripts["zsh"] == f"autoload -U +X bashcompinit && bashcompinit\n{scripts['bash']}"
