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
from pathlib import Path

from elastic_ext.errors import CheckpointDamaged, CheckpointError

from .taking import add_arguments_of_convert, add_arguments_of_export
from .terminal import Terminal

__all__ = ["COMMANDS", "DAMAGED", "DONE", "REFUSED", "Command", "add_commands"]

DONE = 0
DAMAGED = 1
"""Something on the disk is not what was saved, or the file system refused."""
REFUSED = 2
"""The input was refused: no checkpoint there, one of a newer format, arguments that cannot be."""
_BROKEN_PIPE = 141  # as of a program that SIGPIPE ends
_INTERRUPTED = 130
_PATH = "a shared_storage_path, a job's folder in it, or one checkpoint's"


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One of them."""

    words: str
    """What it does, for --help."""
    home: str
    path: str = _PATH
    """What its PATH may be."""
    arguments: Callable[[argparse.ArgumentParser], None] = _no_arguments
    """Adds those that it has besides."""


COMMANDS: Mapping[str, Command] = {
    "convert": Command(
        words="write it as a folder of torch.distributed.checkpoint, or make a checkpoint of such a folder",
        home="convert",
        path=f"{_PATH}; of --to elastic a folder that dcp.save has made, and that is trusted",
        arguments=add_arguments_of_convert,
    ),
    "export": Command(
        words="write the model as plain safetensors files, as from_pretrained and other tools load them",
        home="export",
        arguments=add_arguments_of_export,
    ),
    "ls": Command(words="the checkpoints that are there, with what else lies among them", home="ls"),
}


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the commands; what it parses has ``run``, which gives the exit status."""
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        own = commands.add_parser(name, help=command.words, description=command.words)
        own.add_argument("path", type=Path, metavar="PATH", help=command.path)
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
    except CheckpointDamaged as error:
        terminal.complain(str(error))
        return DAMAGED
    except CheckpointError as error:
        terminal.complain(f"refused: {error}")
        return REFUSED
    except OSError as error:
        terminal.complain(str(error))
        return DAMAGED
    return status
