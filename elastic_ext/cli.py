"""elastic-ext: the command line.

    elastic-ext run ... SCRIPT ...             torchrun's command line: elastic-run is the same; this imports torch

    elastic-ext config show                    what the file holds
    elastic-ext config set KEY=VALUE...        write the next version; KEY= takes a key out of the file
    elastic-ext config diff [FROM [TO]]        what differs between two versions
    elastic-ext config history                 every version, with its reason
    elastic-ext config undo                    the content before this one, as a new version

    elastic-ext status [RUN_DIR]               who runs, how far it is, what is wrong

    elastic-ext report [RUN] --out FILE        where the time of a training went, on one page

    elastic-ext ckpt ls PATH                   the checkpoints that are there
    elastic-ext ckpt show PATH                 what is in one, tensor by tensor
    elastic-ext ckpt verify PATH               every byte read and checked
    elastic-ext ckpt prune PATH                old ones removed, and what dead saves have left
    elastic-ext ckpt export PATH DEST          the model as plain safetensors files
    elastic-ext ckpt convert PATH --to ... DEST    to torch.distributed.checkpoint, and back; this alone imports torch

    elastic-ext doctor                         what is wrong with this machine, and what to do
    elastic-ext doctor --rdzv-endpoint HOST:PORT --nnodes N    ... and with pairs of nodes; this imports torch

The file of `config` is given with --file, or found through ELASTIC_EXT_CONFIG_FILE or ELASTIC_EXT_RUN_DIR. Where an
agent runs, `set` and `undo` have it write the file.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from .agent.asking import AgentFailed, AgentRefused, ControlError
from .agent.contact import AgentsConfig, living_agent_of
from .agent.status_command import add_arguments as add_arguments_of_status
from .agent.status_command import run as run_status
from .ckpt.commands import add_commands
from .ckpt.taking import path_of
from .ckpt.terminal import Terminal
from .config import ElasticConfig
from .doctor.command import add_doctor
from .errors import ConfigError, Refusal, in_words
from .given import expanded
from .history import ConfigHistory, Entry
from .keys import KEYS
from .report.command import add_report
from .report.command import run as run_report
from .strict_json import read_value, shown
from .wording import on_one_line

__all__ = ["main", "parse_assignment"]

_LAUNCHER = "run"  # imports torch
_BROKEN_PIPE = 141  # as of a program that SIGPIPE ends


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; gives the exit status: 0 done, 1 the file system refused, 2 the input was refused."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["run"]:  # what comes next is for the launcher, and for the script
        return int(importlib.import_module(f".{_LAUNCHER}", __package__).main(given[1:]))
    if sys.stdout is None:  # it was closed before this began
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 until the process ends
    options = _parser().parse_args(given)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except OSError as error:  # commands tell of all that they read and write, so that it is the output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left must not fail at the exit
        if isinstance(error, BrokenPipeError):  # whoever reads has seen enough
            return _BROKEN_PIPE
        print(f"elastic-ext: the output cannot be written: {in_words(error)}", file=sys.stderr)
        return 1
    return status


def _run_config(options: argparse.Namespace) -> int:
    try:
        history = ConfigHistory(_file(options.file, os.environ))
        output = _COMMANDS[options.command](history, options)
    except ConfigError as error:
        print(f"elastic-ext: refused: {error}", file=sys.stderr)
        return 2
    except AgentRefused as error:
        print(f"elastic-ext: refused: {on_one_line(str(error))}", file=sys.stderr)
        return 2
    except (OSError, AgentFailed) as error:
        print(f"elastic-ext: {on_one_line(str(error))}; the config file is as it was", file=sys.stderr)
        return 1
    except ControlError as error:
        print(f"elastic-ext: {on_one_line(str(error))}", file=sys.stderr)
        return 1
    encoding = sys.stdout.encoding or "utf-8"  # what the terminal cannot show is escaped
    sys.stdout.write(output.encode(encoding, "backslashreplace").decode(encoding))
    return 0


def _run_status(options: argparse.Namespace) -> int:
    return run_status(options, os.environ, Terminal(sys.stdout, sys.stderr, as_json=options.json))


def _run_report(options: argparse.Namespace) -> int:
    return run_report(options, os.environ, Terminal(sys.stdout, sys.stderr, as_json=options.json))


def parse_assignment(text: str) -> tuple[str, object]:
    """``KEY=VALUE`` as key and value: JSON where it is JSON, else text; None where the value is empty.

    ConfigError if it is neither, or JSON that a config cannot hold.
    """
    path, equals, value = text.partition("=")
    if not equals or not path:
        raise _refused(shown(text), "KEY=VALUE, such as optimizer.learning_rate=0.001")
    if value == "":
        return path, None
    try:
        return path, read_value(value)
    except json.JSONDecodeError:
        return path, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="elastic-ext", description="Look at and change elastic training jobs.")
    groups = parser.add_subparsers(required=True)
    groups.add_parser("run", help="start the workers of a job on this machine: elastic-run")
    add_commands(groups.add_parser("ckpt", help="the checkpoints of jobs"))
    status = groups.add_parser("status", help="how a job does on this machine", description=_STATUS)
    add_arguments_of_status(status)
    status.set_defaults(run=_run_status)
    report = groups.add_parser("report", help="where the time of a training went, on one page")
    add_report(report)
    report.set_defaults(run=_run_report)
    add_doctor(groups.add_parser("doctor", help="what is wrong with this machine, or with pairs of nodes"))
    config = groups.add_parser("config", help="the versioned config file of a job")
    config.set_defaults(run=_run_config)
    commands = config.add_subparsers(dest="command", required=True)
    by_name: dict[str, argparse.ArgumentParser] = {}
    for name, words in _HELP.items():
        by_name[name] = commands.add_parser(name, help=words, description=words)
        by_name[name].add_argument("--file", type=path_of, help="the config file")
    by_name["set"].add_argument("assignments", nargs="+", metavar="KEY=VALUE", help="KEY= takes the key out")
    by_name["set"].add_argument("--reason", default="", help="why, for the log and the history")
    by_name["set"].add_argument("--at-step", type=int, help="the first step that runs under this version")
    for name in ("set", "undo"):
        by_name[name].add_argument("--force", action="store_true", help="write the file even where an agent has it")
    by_name["diff"].add_argument("versions", nargs="*", type=int, metavar="VERSION", help="from, and to")
    by_name["history"].add_argument("--json", action="store_true", help="one JSON object per version")
    return parser


def _file(given: Path | None, environ: Mapping[str, str]) -> Path:
    if given is not None:
        return given
    if environ.get("ELASTIC_EXT_CONFIG_FILE"):
        return _path_in(environ, "ELASTIC_EXT_CONFIG_FILE")
    if environ.get("ELASTIC_EXT_RUN_DIR"):
        return _path_in(environ, "ELASTIC_EXT_RUN_DIR") / "config.json"
    raise _refused("no config file is named", "--file FILE, or ELASTIC_EXT_CONFIG_FILE or ELASTIC_EXT_RUN_DIR set")


def _path_in(environ: Mapping[str, str], name: str) -> Path:
    try:
        return expanded(environ[name])
    except ValueError:
        raise _refused(f"{name} is {shown(environ[name])}", "a path, with ~ for a home folder that exists") from None


def _show(history: ConfigHistory, options: argparse.Namespace) -> str:
    return _existing(history).to_json()


def _set(history: ConfigHistory, options: argparse.Namespace) -> str:
    pairs = dict(parse_assignment(text) for text in options.assignments)
    for path, value in pairs.items():
        if value is None and f"{path}=" not in options.assignments:
            raise _refused(f"{path} is null", f"a value, or {path}= to take the key out")
    new = _writer(history, options).set(
        {path: value for path, value in pairs.items() if value is not None},
        remove=[path for path, value in pairs.items() if value is None],
        reason=options.reason,
        at_step=options.at_step,
    )
    return _written(history, new)


def _diff(history: ConfigHistory, options: argparse.Namespace) -> str:
    _existing(history)
    entries = history.entries()
    if len(options.versions) > 2:
        raise _refused(f"{len(options.versions)} versions are given", "at most two: from, and to")
    given = [_version(entries, version) for version in options.versions]
    first = given[0] if given else entries[-2 if len(entries) > 1 else -1].config
    second = given[1] if len(given) > 1 else entries[-1].config
    return _changes(first, second)


def _history(history: ConfigHistory, options: argparse.Namespace) -> str:
    entries = history.entries()
    if options.json:
        return "".join(entry.to_json() + "\n" for entry in entries)
    lines = []
    previous = ElasticConfig(version=0)
    for entry in entries:
        when = datetime.fromtimestamp(entry.time).strftime("%Y-%m-%d %H:%M:%S")
        reason = f": {on_one_line(entry.config.reason)}" if entry.config.reason else ""
        lines.append(f"version {entry.config.version}, {when}{reason}\n")
        lines += [f"  {line}\n" for line in _changes(previous, entry.config).splitlines()]
        previous = entry.config
    return "".join(lines)


def _undo(history: ConfigHistory, options: argparse.Namespace) -> str:
    return _written(history, _writer(history, options).undo())


def _writer(history: ConfigHistory, options: argparse.Namespace) -> ConfigHistory | AgentsConfig:
    """Who is to write the file: the agent that has it, where one runs."""
    if options.force:
        return history
    folders = [history.path.parent]
    if os.environ.get("ELASTIC_EXT_RUN_DIR"):
        folders.append(_path_in(os.environ, "ELASTIC_EXT_RUN_DIR"))
    agent = living_agent_of(history.path, folders, host=socket.gethostname())
    return history if agent is None else AgentsConfig(agent)


_COMMANDS = {"show": _show, "set": _set, "diff": _diff, "history": _history, "undo": _undo}
_HELP = {
    "show": "what the file holds",
    "set": f"write the next version; keys: {', '.join(path for path in KEYS if '.' in path)}, user.NAME",
    "diff": "what differs between two versions; by default the last two",
    "history": "every version, with its time, reason and changes",
    "undo": "write the content before this one as a new version",
}


_STATUS = """Say how a job does on this machine: who runs, how far it is, and what is wrong; without an argument the job
of ELASTIC_EXT_RUN_DIR, or all that have their run directory where it is by default. Exit status: 0 healthy, 1 trouble,
2 there is no such job."""


def _existing(history: ConfigHistory) -> ElasticConfig:
    current = history.current()
    if current is None:
        raise _refused(f"{history.path} does not exist", "a config file; `config set` makes one")
    return current


def _version(entries: Sequence[Entry], version: int) -> ElasticConfig:
    found = [entry.config for entry in entries if entry.config.version == version]
    if not found:
        known = ", ".join(str(entry.config.version) for entry in entries)
        raise _refused(f"version {version} is not in the history", f"one of {known}")
    return found[-1]


def _changes(old: ElasticConfig, new: ElasticConfig) -> str:
    lines = (f"{path}: {_value(before)} -> {_value(after)}\n" for path, (before, after) in old.differences(new).items())
    return "".join(lines)


def _value(value: object) -> str:
    return "absent" if value is None else shown(value, 200)


def _written(history: ConfigHistory, new: ElasticConfig) -> str:
    earlier = [entry.config for entry in history.entries() if entry.config.version < new.version]
    before = earlier[-1] if earlier else ElasticConfig(version=0)
    return f"version {new.version} written\n{_changes(before, new)}"


def _refused(given: str, allowed: str) -> ConfigError:
    return ConfigError([Refusal(key="", given=given, allowed=allowed)])


if __name__ == "__main__":
    sys.exit(main())
