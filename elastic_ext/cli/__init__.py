"""elastic-ext: the command line.

    elastic-ext run ... SCRIPT ...             torchrun's command line: elastic-run is the same; this imports torch

    elastic-ext config show                    what the file holds
    elastic-ext config set KEY=VALUE...        write the next version; KEY= takes a key out of the file
    elastic-ext config diff [FROM [TO]]        what differs between two versions
    elastic-ext config history                 every version, with its reason
    elastic-ext config undo                    the content before this one, as a new version
    elastic-ext config schema                  the JSON Schema of the file, for editors

    elastic-ext status [RUN_DIR] --watch       who runs, how far it is, what is wrong; again and again
    elastic-ext events [RUN_DIR] --follow      what has happened, and what does

    elastic-ext members [--job NAME]           who trains, who warms up to join, how members can change, and have
    elastic-ext members drain NODE             have a node leave; with --after-join after one joined

    elastic-ext tuning log                     what the tuner has decided, why, and what came of it
    elastic-ext tuning pause|resume|undo       have it wait, go on, or take its last change back
    elastic-ext tuning memory [RUN_DIR]        what the model takes of memory, and what other sizes and plans would

    elastic-ext report [RUN] --out FILE        where the time of a training went, on one page

    elastic-ext ckpt ls PATH                   the checkpoints that are there
    elastic-ext ckpt show PATH                 what is in one, tensor by tensor
    elastic-ext ckpt verify PATH               every byte read and checked
    elastic-ext ckpt prune PATH                old ones removed, and what dead saves have left
    elastic-ext ckpt export PATH DEST          the model as plain safetensors files
    elastic-ext ckpt convert PATH --to ... DEST    to torch.distributed.checkpoint, and back; this alone imports torch

    elastic-ext completion bash                the script by which a shell completes these command lines

    elastic-ext doctor                         what is wrong with this machine, and what to do
    elastic-ext doctor --rdzv-endpoint HOST:PORT --nnodes N    ... and with pairs of nodes; this imports torch

A job is named by --job, or by ELASTIC_EXT_RUN_DIR; else it is the only one that runs on this machine, or, for commands
that only read, the only one that has run. The file of `config` can be given with --file or ELASTIC_EXT_CONFIG_FILE.
Where an agent runs, `set` and `undo` have it write the file. With --master ADDR, or ELASTIC_EXT_MASTER, a job's master
is asked instead, from any machine: by `config`, `status` and `events`; `tuning` always asks one, but for `memory`,
which reads files.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial

from elastic_ext.agent.config_writer import agent_in
from elastic_ext.agent.control import AgentFailed, AgentRefused, ControlError
from elastic_ext.config.keys import KEYS
from elastic_ext.config.schema import json_schema
from elastic_ext.errors import ConfigError, MasterError, MasterRefused, in_words
from elastic_ext.master.address import MasterPlace, add_master_arguments, master_in, named_master
from elastic_ext.records.agent import MASTER_FILE
from elastic_ext.records.text import on_one_line
from elastic_ext.version import VERSION

from .ckpt import Terminal, add_commands, path_of, run_ckpt
from .completion import SHELLS, completed, script_for
from .config import COMMANDS, ConfigPlace, FilesConfig, RefusedByJob, parse_assignment, remark_beside
from .doctor import add_doctor, run_doctor
from .jobs import JobHere, add_job, one_job
from .members import add_members
from .members import run_members as run_members_command
from .memory import add_memory, run_memory
from .report import add_report
from .report import run as run_report
from .status import INTERRUPTED, add_arguments_of_events, add_arguments_of_status, run_events, run_status, watch

__all__ = ["main", "parse_assignment"]

_LAUNCHER, _LAUNCHER_ARGUMENTS = "elastic_ext.run", "elastic_ext.agent.arguments"  # import torch
_PROGRAMS = ("elastic-ext", "elastic-run")
_OF_VERSION = ("version", "reason", "apply_at_step")  # keys that `config set` does not take
_SET_KEYS = tuple(path for path in KEYS if path not in _OF_VERSION)
_BROKEN_PIPE = 141  # as of a program that SIGPIPE ends


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of elastic-ext; gives its exit status: 0 done, 1 failed or trouble found, 2 refused.

    After Ctrl-C it is 130, and 141 where nobody reads the output any more.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["run"]:  # what comes next is for the launcher, and for the script
        return int(importlib.import_module(_LAUNCHER).main(given[1:]))
    if sys.stdout is None:  # it was closed before this began
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 until the process ends
    options = _parser().parse_args(given)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:  # commands tell of all that they read and write, so that it is the output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left must not fail at the exit
        if isinstance(error, BrokenPipeError):  # whoever reads has seen enough
            return _BROKEN_PIPE
        print(f"elastic-ext: the output cannot be written: {in_words(error)}", file=sys.stderr)
        return 1
    return status


def _run_config(options: argparse.Namespace) -> int:
    try:
        master = named_master(options, os.environ, is_other=options.file is not None or options.job is not None)
        place: ConfigPlace = FilesConfig.named(options, os.environ) if master is None else _masters_config(master)
        output = COMMANDS[options.command](place, options)
        remark = remark_beside(place, options)
    except RefusedByJob as error:
        _print_on_terminal(error.output)
        print(f"elastic-ext: {on_one_line(str(error))}", file=sys.stderr)
        return 2
    except (ConfigError, AgentRefused, MasterRefused, ValueError) as error:
        print(f"elastic-ext: refused: {on_one_line(str(error))}", file=sys.stderr)
        return 2
    except (OSError, AgentFailed) as error:
        print(f"elastic-ext: {on_one_line(str(error))}; the config file is as it was", file=sys.stderr)
        return 1
    except (ControlError, MasterError) as error:
        print(f"elastic-ext: {on_one_line(str(error))}", file=sys.stderr)
        return 1
    _print_on_terminal(output)
    if remark:
        print(f"elastic-ext: {on_one_line(remark)}", file=sys.stderr)
    return 0


def _print_on_terminal(output: str) -> None:
    """Write to stdout; what the terminal cannot show is escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(output.encode(encoding, "backslashreplace").decode(encoding))


def _run_ckpt(options: argparse.Namespace) -> int:
    return run_ckpt(options, os.environ)


def _run_doctor(options: argparse.Namespace) -> int:
    return run_doctor(options, os.environ)


def _run_schema(options: argparse.Namespace) -> int:
    sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")
    return 0


def _run_completion(options: argparse.Namespace) -> int:
    is_own = options.program == _PROGRAMS[0]
    parser = _parser() if is_own else importlib.import_module(_LAUNCHER_ARGUMENTS).parser()
    keys = {"KEY=VALUE": [f"{path}=" for path in _SET_KEYS]}
    sys.stdout.write(script_for(options.shell, options.program, list(completed(parser, keys))))
    return 0


def _masters_config(place: MasterPlace) -> ConfigPlace:
    _quiet_grpc()
    from elastic_ext.master.client import RemoteConfig

    return RemoteConfig(place)


def _run_status(options: argparse.Namespace) -> int:
    terminal = Terminal(sys.stdout, sys.stderr, as_json=options.json)
    try:
        master = named_master(options, os.environ, is_other=options.run_dir is not None or options.job is not None)
    except ValueError as error:
        terminal.complain(str(error))
        return 2
    if master is None:
        look: Callable[[Terminal], int] = partial(run_status, options, os.environ)
    else:
        _quiet_grpc()
        from .master import run_status as run_status_of_master

        look = partial(run_status_of_master, master)
    return look(terminal) if options.watch is None else watch(look, terminal, options.watch)


def _run_events(options: argparse.Namespace) -> int:
    terminal = Terminal(sys.stdout, sys.stderr, as_json=options.json)
    try:
        master = named_master(options, os.environ, is_other=options.run_dir is not None or options.job is not None)
        if master is None:
            return run_events(options, os.environ, terminal)
        _quiet_grpc()
        from .master import run_events as run_events_of_master

        return run_events_of_master(master, terminal, most=options.last, follow=options.follow)
    except ValueError as error:
        terminal.complain(str(error))
        return 2


def _run_tuning(options: argparse.Namespace) -> int:
    terminal = Terminal(sys.stdout, sys.stderr, as_json=options.json)
    try:
        master, job = named_master(options, os.environ, is_other=options.job is not None), ""
        if master is None:
            folders = _named_or_found(options.job, writes=options.command != "log").newest_first()
            if options.command == "log" and not any((each / MASTER_FILE).exists() for each in folders):
                from .master import run_stored_log  # imports grpc

                status = run_stored_log(folders, options, terminal)
                if status is not None:
                    return status
            master = master_in(folders, options, os.environ)
            job = next((agent.job for each in folders if (agent := agent_in(each)) is not None), "")
    except OSError as error:
        terminal.complain(in_words(error))
        return 2
    except ValueError as error:
        terminal.complain(f"refused: {error}")
        return 2
    _quiet_grpc()
    from .master import run_tuning

    return run_tuning(master, job, options, terminal)


def _named_or_found(job: str | None, *, writes: bool) -> JobHere:
    """The job whose master is to be asked; ValueError where none is found, or several may be meant."""
    try:
        return one_job(None, job, os.environ, ways="--job NAME", writes=writes)
    except ValueError as error:
        if job is not None:
            raise
        raise ValueError(
            f"no master is named, and {error}; allowed: --master ADDR, HOST:PORT or the run directory of one of its "
            "agents, --job NAME, or ELASTIC_EXT_MASTER set"
        ) from None


def _run_memory(options: argparse.Namespace) -> int:
    return run_memory(options, os.environ, Terminal(sys.stdout, sys.stderr, as_json=options.json))


def _run_members(options: argparse.Namespace) -> int:
    return run_members_command(options, os.environ, Terminal(sys.stdout, sys.stderr, as_json=options.json))


def _quiet_grpc() -> None:
    """Keep grpc from printing what goes wrong with connections, since commands say that themselves."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def _run_report(options: argparse.Namespace) -> int:
    return run_report(options, os.environ, Terminal(sys.stdout, sys.stderr, as_json=options.json))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="elastic-ext", description="Look at and change elastic training jobs.")
    parser.add_argument("--version", action="version", version=f"elastic-ext {VERSION}")
    groups = parser.add_subparsers(required=True)
    groups.add_parser("run", help="start the workers of a job on this machine: elastic-run")
    ckpt = groups.add_parser("ckpt", help="the checkpoints of jobs")
    add_commands(ckpt)
    ckpt.set_defaults(run=_run_ckpt)
    status = groups.add_parser("status", help="how a job does on this machine", description=_STATUS)
    add_arguments_of_status(status)
    status.set_defaults(run=_run_status)
    events = groups.add_parser("events", help="what has happened to a job", description=_EVENTS)
    add_arguments_of_events(events)
    events.set_defaults(run=_run_events)
    members = groups.add_parser("members", help="which nodes train, and how they join and leave", description=_MEMBERS)
    add_members(members)
    members.set_defaults(run=_run_members)
    report = groups.add_parser("report", help="where the time of a training went, on one page")
    add_report(report)
    report.set_defaults(run=_run_report)
    completion = groups.add_parser("completion", help=_COMPLETION, description=_COMPLETION)
    completion.add_argument("shell", choices=SHELLS, help="the shell that reads it")
    completion.add_argument(
        "program", nargs="?", choices=_PROGRAMS, default=_PROGRAMS[0], help="whose command line (default: elastic-ext)"
    )
    completion.set_defaults(run=_run_completion)
    _add_tuning(groups.add_parser("tuning", help="what the tuner of a job does", description=_TUNING))
    doctor = groups.add_parser("doctor", help="what is wrong with this machine, or with pairs of nodes")
    add_doctor(doctor)
    doctor.set_defaults(run=_run_doctor)
    config = groups.add_parser("config", help="the versioned config file of a job")
    config.set_defaults(run=_run_config)
    commands = config.add_subparsers(dest="command", required=True)
    by_name: dict[str, argparse.ArgumentParser] = {}
    for name, words in _HELP.items():
        by_name[name] = commands.add_parser(name, help=words, description=words)
        which = by_name[name].add_mutually_exclusive_group()
        which.add_argument("--file", type=path_of, help="the config file, or the run directory of its job")
        add_job(which)
        add_master_arguments(by_name[name], which)
    schema = commands.add_parser("schema", help=_SCHEMA, description=_SCHEMA)
    schema.set_defaults(run=_run_schema)
    by_name["set"].add_argument("assignments", nargs="+", metavar="KEY=VALUE", help="KEY= takes the key out")
    by_name["set"].add_argument("--reason", default="", help="why, for the log and the history")
    by_name["set"].add_argument("--at-step", type=int, help="the first step that runs under this version")
    for name in ("set", "undo"):
        by_name[name].add_argument("--force", action="store_true", help="write the file even where an agent has it")
    by_name["diff"].add_argument("versions", nargs="*", type=int, metavar="VERSION", help="from, and to")
    for name in ("set", "undo", "diff"):
        by_name[name].add_argument("--json", action="store_true", help="a JSON object")
    by_name["history"].add_argument("--json", action="store_true", help="one JSON object per version")
    return parser


def _add_tuning(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_run_tuning)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, words in _TUNING_HELP.items():
        command = commands.add_parser(name, help=words, description=words)
        which = command.add_mutually_exclusive_group()
        add_job(which)
        add_master_arguments(command, which)
        command.add_argument("--json", action="store_true", help="JSON: of log an object per decision, else one object")
        if name == "log":
            command.add_argument("--last", type=_count, default=0, metavar="N", help="the newest N (default: all)")
        else:
            command.add_argument("--reason", default="", help="why, for the log")
    memory = commands.add_parser("memory", help="what the model takes of memory, and what other sizes and plans would")
    add_memory(memory)
    memory.set_defaults(run=_run_memory)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) < 1 << 31):
        raise argparse.ArgumentTypeError(f"{text!r} is given; allowed: a number")
    return int(text)


_TUNING = """Show what the tuner of a job's master has decided, with why, what it expected and what it measured; or
have it wait, go on, or take its last change back; or show what the model takes of memory, which asks no master. Exit
status: 0 done, 1 nobody answers, 2 refused."""
_TUNING_HELP = {
    "log": "every decision that is kept, oldest first",
    "pause": "have the tuner decide nothing until `resume`",
    "resume": "have the tuner go on",
    "undo": "take back the last change that the tuner has made, and pause",
}
_HELP = {
    "show": "what the file holds",
    "set": f"write the next version; keys: {', '.join(_SET_KEYS)}, user.NAME",
    "diff": "what differs between two versions; by default the last two",
    "history": "every version, with its time, reason and changes",
    "undo": "write the content before this one as a new version",
}


_COMPLETION = 'the script by which a shell completes command lines: eval "$(elastic-ext completion bash)"'
_SCHEMA = "the JSON Schema of the config file, by which an editor completes and checks it"
_MEMBERS = """Show which nodes train by which membership plan, who warms up to join, how members can change, and the
last changes, from the files of run directories; or have a node leave. Exit status: 0 done, 1 nobody answers, 2
refused."""
_EVENTS = """Show what has happened to a job, oldest first: from the files of its run directory, or from its master."""
_STATUS = """Say how a job does on this machine: who runs, how far it is, and what is wrong; without an argument the job
of ELASTIC_EXT_RUN_DIR, or all that have their run directory where it is by default: the only one that runs in full, the
others in a line each. Exit status: 0 healthy, 1 trouble, 2 there is no such job."""
