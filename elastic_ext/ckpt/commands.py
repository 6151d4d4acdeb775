"""The table of the commands of `elastic-ext ckpt`, and what all of them have: a PATH, --json, and an exit status.

One entry makes a command. Its ``home`` is the module beside this one whose ``run(options, terminal)`` does it and gives
the exit status; it is imported when it is called for, so that one which needs torch costs the others nothing.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elastic_ext.errors import CheckpointDamaged, CheckpointError
from elastic_ext.records.text import on_one_line

from .taking import add_arguments_of_convert, add_arguments_of_export, path_of
from .terminal import Terminal

__all__ = ["COMMANDS", "DAMAGED", "DONE", "REFUSED", "Command", "add_commands", "in_words", "status_of"]

DONE = 0
DAMAGED = 1
"""Something on the disk is not what was saved, or the file system refused."""
REFUSED = 2
"""The input was refused: no checkpoint there, one of a newer format, arguments that cannot be."""
_BROKEN_PIPE = 141  # as of a program that SIGPIPE ends
_INTERRUPTED = 130
_PATH = "a shared_storage_path, a job's folder in it, or one checkpoint's"


_ONE = "a checkpoint's folder, or its job's, which stands for the newest one"
_JOB = "a job's folder, or a shared_storage_path, which stands for all jobs in it"


def _of_none(parser: argparse.ArgumentParser) -> None:
    pass


def _of_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--boxes", action="store_true", help="which part of each tensor every rank has")


def _of_prune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--keep-last", type=_count, metavar="N", help="keep the newest N (1, where only --keep-every is given)"
    )
    parser.add_argument(
        "--keep-every", type=_count, metavar="STEPS", help="keep the first from each multiple of STEPS on"
    )
    parser.add_argument("--abandoned", action="store_true", help="remove those too that training went on without")
    parser.add_argument("--dry-run", action="store_true", help="say what would be removed")


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 18 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is given; allowed: an integer >= 1")
    return int(text)


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One of them."""

    words: str
    """What it does, for --help."""
    home: str
    path: str = _PATH
    """What its PATH may be."""
    arguments: Callable[[argparse.ArgumentParser], None] = _of_none
    """Adds those that it has besides."""


COMMANDS: Mapping[str, Command] = {
    "ls": Command(words="the checkpoints that are there, and what else lies among them", home="ls"),
    "show": Command(words="what is in a checkpoint, tensor by tensor", home="show", path=_ONE, arguments=_of_show),
    "verify": Command(words="read and check every byte; tells of each damage", home="verify"),
    "prune": Command(
        words="remove old checkpoints, and what dead saves have left", home="prune", path=_JOB, arguments=_of_prune
    ),
    "convert": Command(
        words="write it as a folder of torch.distributed.checkpoint, or make a checkpoint of such a folder",
        home="convert",
        path=f"{_ONE}; of --to elastic a folder that dcp.save has made",
        arguments=add_arguments_of_convert,
    ),
    "export": Command(
        words="write the model as plain safetensors files, as from_pretrained and other tools load them",
        home="export",
        path=_ONE,
        arguments=add_arguments_of_export,
    ),
}


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the commands; what it parses has ``run``, which gives the exit status."""
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        own = commands.add_parser(name, help=command.words, description=command.words)
        own.add_argument("path", type=path_of, metavar="PATH", help=command.path)
        own.add_argument("--json", action="store_true", help="one JSON object per line")
        command.arguments(own)
        own.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    terminal = Terminal(sys.stdout, sys.stderr, as_json=options.json)
    try:
        status: int = importlib.import_module(f".{COMMANDS[options.command].home}", __package__).run(options, terminal)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has seen enough; what is left in the buffer must not fail at the exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except KeyboardInterrupt:
        return _INTERRUPTED
    except (CheckpointError, OSError) as error:
        terminal.complain(in_words(error))
        return status_of(error)
    return status


def status_of(error: CheckpointError | OSError) -> int:
    """The exit status that an error stands for."""
    return REFUSED if isinstance(error, CheckpointError) and not isinstance(error, CheckpointDamaged) else DAMAGED


def in_words(error: CheckpointError | OSError) -> str:
    """What it says, on one line."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return on_one_line(f"{os.fsdecode(error.filename)}: {error.strerror}")
    return on_one_line(str(error))
