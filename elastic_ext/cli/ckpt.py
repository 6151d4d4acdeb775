"""The commands of `elastic-ext ckpt`: their table, the paths and options that they share, and where
their output goes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal, TextIO

from elastic_ext.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound
from elastic_ext.fsdp.checkpoint.folder.commit import COMMIT, Commit
from elastic_ext.fsdp.checkpoint.folder.job_folder import FOLDER
from elastic_ext.fsdp.checkpoint.folder.listing import ListedCheckpoint, Listing, is_name, is_set_aside, newest_of
from elastic_ext.records.text import Progress, counted, cut, on_one_line

from .jobs import add_job, checkpoints_of, one_job

__all__ = [
    "COMMANDS",
    "DAMAGED",
    "DONE",
    "DTYPES",
    "ONLY_TO",
    "REFUSED",
    "Command",
    "FolderContents",
    "Terminal",
    "add_arguments_of_convert",
    "add_arguments_of_export",
    "add_commands",
    "age_of",
    "bytes_of",
    "in_words",
    "layout_of",
    "one_checkpoint",
    "pair_of",
    "path_of",
    "place_of",
    "run_ckpt",
    "size_of",
    "status_of",
]


# --- where a command's findings go, each in words or as one line of JSON, and bars for those who look ----------------


_HOME, _TO_LINE_END, _TO_SCREEN_END = "\x1b[H", "\x1b[K", "\x1b[J"
_OWN_SCREEN, _FORMER_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""What has a terminal show another screen without a cursor, and the former one with its cursor."""
_LEAVING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)
"""Signals that end a command that shows a screen, and the one that stops it until it is in the foreground again."""


class Terminal:
    """The output of one command, as words or as lines of JSON, and its complaints and progress bars on stderr."""

    def __init__(self, out: TextIO, err: TextIO, *, as_json: bool, width: int | None = None) -> None:
        """``width`` is how many characters a line may have where ``out`` is no terminal; None for any number."""
        self.as_json = as_json
        self._out = out
        self._err = err
        self._width = width
        self._painted = ""

    @property
    def width(self) -> int | None:
        """How many characters a line of the output may have; None where it is no terminal."""
        return shutil.get_terminal_size().columns if self.is_screen else self._width

    @property
    def is_screen(self) -> bool:
        """Whether the output is a terminal, which people look at."""
        return self._out.isatty()

    def paint(self, words: str) -> None:
        """Show ``words`` from the first line of the screen on, in place of what stands there, as far as there is room.

        Each line is cleared before it is written, and before the last one all that is below it: to clear after a line
        that is as long as the screen is wide would take its last character.
        """
        width, height = shutil.get_terminal_size()
        lines = [cut(line, width) for line in words.rstrip("\n").split("\n")]
        if len(lines) > height:
            lines[height - 1 :] = [cut(f"({counted(len(lines) - height + 1, 'line')} more)", width)]
        *above, last = (_printable(line, self._out) for line in lines)
        written = "".join(f"{_TO_LINE_END}{line}\n" for line in above)
        self._painted = f"{_HOME}{written}{_TO_SCREEN_END}{last}"
        self._out.write(self._painted)
        self._out.flush()

    @contextlib.contextmanager
    def screen(self) -> Iterator[None]:
        """A context in which the terminal has a screen of its own to ``paint`` on; what was there before comes back.

        It does so too where a signal ends or stops this process. What was painted last is shown again as the process
        goes on. Called in the main thread.
        """
        descriptor = self._out.fileno()  # written to as a signal comes, perhaps in the middle of a write to the stream

        def obey(number: int, frame: FrameType | None) -> None:
            with contextlib.suppress(OSError):  # the terminal is gone, of which SIGHUP tells
                os.write(descriptor, _FORMER_SCREEN.encode())
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            signal.signal(number, obey)  # it was stopped, and goes on
            os.write(descriptor, f"{_OWN_SCREEN}{self._painted}".encode(self._out.encoding))

        numbers = [number for number in _LEAVING if signal.getsignal(number) == signal.SIG_DFL]  # as under nohup
        try:
            for number in numbers:
                signal.signal(number, obey)
            self._out.write(_OWN_SCREEN)
            self._out.flush()
            yield
        finally:
            self._out.write(_FORMER_SCREEN)
            self._out.flush()
            for number in numbers:
                signal.signal(number, signal.SIG_DFL)

    def tell(self, record: Mapping[str, object], words: str) -> None:
        """Write one finding: ``record`` on a line of its own where JSON is asked for, else ``words``."""
        self._write(json.dumps(record, allow_nan=False) if self.as_json else words)

    def say(self, words: str) -> None:
        """Write what is only for people, such as a heading or a sum; nothing where JSON is asked for."""
        if not self.as_json:
            self._write(words)

    def print(self, page: str, complaints: str) -> None:
        """Write what another Terminal has written: its page to the output, its complaints to stderr."""
        self._out.write(_printable(page, self._out))
        self._out.flush()
        self._err.write(_printable(complaints, self._err))

    def complain(self, words: str) -> None:
        """Write what went wrong to stderr."""
        self._out.flush()
        self._err.write(_printable(f"elastic-ext: {words}\n", self._err))

    def flush(self) -> None:
        """Flush the output, so that what was written can be seen while the command goes on."""
        self._out.flush()

    @contextlib.contextmanager
    def bar(self, description: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
        """A progress bar of ``num_bytes`` on a terminal, as a context; it gives a function that takes bytes done."""
        progress = Progress(is_shown=self._err.isatty(), unit="B")
        progress.begin(description, num_bytes)
        try:
            yield progress.advance
        finally:
            progress.end()

    @contextlib.contextmanager
    def total_bar(self, description: str) -> Iterator[Callable[[int, int], None]]:
        """A progress bar whose size is not known before; its function takes the bytes done so far, and those of all."""
        told = 0
        with contextlib.ExitStack() as stack:
            advance: list[Callable[[int], None]] = []

            def tell(done: int, total: int) -> None:
                nonlocal told
                if not advance:
                    advance.append(stack.enter_context(self.bar(description, total)))
                advance[0](done - told)
                told = done

            yield tell

    def _write(self, words: str) -> None:
        self._out.write(_printable(f"{words}\n", self._out))


def _printable(words: str, stream: TextIO) -> str:
    """``words`` with what the stream cannot hold escaped, and without what would steer a terminal."""
    encoding = stream.encoding or "utf-8"
    words = "\n".join(map(on_one_line, words.split("\n")))
    return words.encode(encoding, "backslashreplace").decode(encoding)


# --- the arguments of `ckpt export` and `ckpt convert` ---------------------------------------------------------------
# The arguments of `ckpt export` and `ckpt convert`, which take a checkpoint elsewhere, and what is read from them.

DTYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMGT]?)(i?)B?", re.IGNORECASE)


def add_arguments_of_export(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the arguments of ``elastic-ext ckpt export`` besides PATH."""
    parser.add_argument(
        "dest", type=path_of, metavar="DEST", help="the folder to write into; it may hold a config and a tokenizer"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="the type of floating-point numbers; default: as saved")
    parser.add_argument(
        "--rename",
        action="append",
        default=[],
        type=pair_of,
        metavar="PATTERN=REPLACEMENT",
        help="change names as re.sub does; several are done one after another",
    )
    parser.add_argument(
        "--strip-prefix", action="append", default=[], metavar="PREFIX", help="take it off the names that have it"
    )
    parser.add_argument(
        "--tied",
        choices=("all", "once"),
        default="all",
        help="write a tensor with several names under each of them (for from_pretrained and load_state_dict), or once "
        "(for safetensors.torch.load_model)",
    )
    parser.add_argument(
        "--max-shard-size", type=size_of, default="5GB", metavar="SIZE", help="of one file, such as 5GB or 500MiB"
    )
    parser.add_argument("--force", action="store_true", help="replace an earlier export in DEST")


ONLY_TO = {"dcp": ("first", "force"), "elastic": ("job", "step", "optimizer", "tied")}
"""The arguments of `ckpt convert` that only one direction has, by the direction."""


def add_arguments_of_convert(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the arguments of ``elastic-ext ckpt convert`` besides PATH."""
    parser.add_argument("--to", choices=tuple(ONLY_TO), required=True, help="what to make of it")
    parser.add_argument(
        "dest", type=path_of, metavar="DEST", help="a folder that is not there yet; of elastic: a shared_storage_path"
    )
    parser.add_argument(
        "--model-key", default="model", metavar="KEY", help='the model\'s in the state dict; "" for all'
    )
    parser.add_argument("--optim-key", default="optim", metavar="KEY", help="the optimizers' in the state dict")
    to_dcp = parser.add_argument_group("to dcp")
    to_dcp.add_argument(
        "--first",
        action="append",
        default=[],
        metavar="NAME",
        help="of the names of a tied parameter, the one that model.named_parameters() has",
    )
    to_dcp.add_argument("--force", action="store_true", help="replace a folder that dcp.save has made")
    to_elastic = parser.add_argument_group("to elastic")
    to_elastic.add_argument("--job", help="the job that is to go on from it; needed")
    to_elastic.add_argument("--step", type=int, help="at which it was saved, where the folder does not say so")
    to_elastic.add_argument(
        "--optimizer", action="append", default=[], metavar="CLASS", help="of the training that goes on, such as AdamW"
    )
    to_elastic.add_argument(
        "--tied", action="append", default=[], type=pair_of, metavar="NAME=NAME", help="two names of one parameter"
    )


def path_of(text: str) -> Path:
    """The path in an argument; '' is refused, since it would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError(
            "it is '', as where a variable is not set; allowed: a path, and '.' for the current folder"
        )
    return Path(text)


def pair_of(text: str) -> tuple[str, str]:
    """The two parts of an argument ``A=B``, cut at the last equals sign: A may be a pattern with some, B is a name."""
    first, equals, second = text.rpartition("=")
    if not first or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form A=B")
    return first, second


def size_of(text: str) -> int:
    """The bytes of a size in an argument: ``5GB`` are 5 * 10**9, ``5GiB`` 5 * 2**30."""
    found = _SIZE.fullmatch(text)
    if found is None or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; allowed: such as 5GB, 500MiB or 1000000")
    base = 1024 if found[3] else 1000
    return max(1, int(float(found[1]) * base ** " KMGT".index(found[2].upper() or " ")))


# --- the table of commands -------------------------------------------------------------------------------------------
# All commands of `elastic-ext ckpt` have a PATH, --json, and an exit status.
#
# One entry makes a command. Its ``home`` is the module beside this one whose ``run_<command>(options, terminal)`` does
# it and gives the exit status; the module is imported when the command is called, so that one which needs torch costs
# the others nothing.

DONE = 0
DAMAGED = 1
"""Exit status where something on the disk is not what was saved, or where the file system refused."""
REFUSED = 2
"""Exit status where the input was refused: no checkpoint there, one of a newer format, or impossible arguments."""
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
    """One command of ``elastic-ext ckpt``: its help, the module that does it, and its arguments."""

    words: str
    """What the command does, for --help."""
    home: str
    """The module beside this one that has ``run_<command>``, which does the command."""
    path: str = _PATH
    """What the command's PATH may be, for --help."""
    finds: Literal["any job", "named jobs", "none"] = "none"
    """The jobs whose checkpoints the command finds without a PATH."""
    arguments: Callable[[argparse.ArgumentParser], None] = _of_none
    """Adds the arguments that the command has besides PATH."""


COMMANDS: Mapping[str, Command] = {
    "ls": Command(
        words="the checkpoints that are there, and what else lies among them", home="ckpt_inspect", finds="any job"
    ),
    "show": Command(
        words="what is in a checkpoint, tensor by tensor",
        home="ckpt_inspect",
        path=_ONE,
        finds="any job",
        arguments=_of_show,
    ),
    "verify": Command(words="read and check every byte; tells of each damage", home="ckpt_inspect", finds="any job"),
    "prune": Command(
        words="remove old checkpoints, and what dead saves have left",
        home="ckpt_inspect",
        path=_JOB,
        finds="named jobs",  # what removes something does not choose what from
        arguments=_of_prune,
    ),
    "convert": Command(
        words="write it as a folder of torch.distributed.checkpoint, or make a checkpoint of such a folder",
        home="ckpt_convert",
        path=f"{_ONE}; of --to elastic a folder that dcp.save has made",
        arguments=add_arguments_of_convert,
    ),
    "export": Command(
        words="write the model as plain safetensors files, as from_pretrained and other tools load them",
        home="ckpt_export",
        path=_ONE,
        arguments=add_arguments_of_export,
    ),
}


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the commands of ``elastic-ext ckpt``, which ``run_ckpt`` does."""
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        own = commands.add_parser(name, help=command.words, description=command.words)
        if command.finds == "none":
            own.add_argument("path", type=path_of, metavar="PATH", help=command.path)
        else:
            which = own.add_mutually_exclusive_group(required=command.finds == "named jobs")
            which.add_argument("path", nargs="?", type=path_of, metavar="PATH", help=command.path)
            add_job(which)
        own.add_argument("--json", action="store_true", help="one JSON object per line")
        command.arguments(own)


def run_ckpt(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Do a command of ``elastic-ext ckpt``; gives the exit status."""
    terminal = Terminal(sys.stdout, sys.stderr, as_json=options.json)
    home = importlib.import_module(f".{COMMANDS[options.command].home}", __package__)
    try:
        if options.path is None:
            options.path = _found(options.job, environ, removes=COMMANDS[options.command].finds == "named jobs")
        status: int = getattr(home, f"run_{options.command}")(options, terminal)
    except BrokenPipeError:  # of the output
        raise
    except (CheckpointError, OSError) as error:
        terminal.complain(in_words(error))
        return status_of(error)
    return status


def _found(job: str | None, environ: Mapping[str, str], *, removes: bool) -> Path:
    """The folder of the checkpoints of a job on this machine; CheckpointNotFound where none is found."""
    try:
        return checkpoints_of(one_job(None, job, environ, ways="PATH or --job NAME"), removes=removes)
    except ValueError as error:
        raise CheckpointNotFound(str(error)) from None


def status_of(error: CheckpointError | OSError) -> int:
    """The exit status that an error stands for."""
    return REFUSED if isinstance(error, CheckpointError) and not isinstance(error, CheckpointDamaged) else DAMAGED


def in_words(error: CheckpointError | OSError) -> str:
    """The message of an error, on one line."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return on_one_line(f"{os.fsdecode(error.filename)}: {error.strerror}")
    return on_one_line(str(error))


# --- what a PATH leads to --------------------------------------------------------------------------------------------
# What a PATH leads to: the storage of many jobs, a job's folder, or one checkpoint's; known by what lies there.

_HOLDERS = ("RUN.json", "RUN.lock")
_WANTED = (
    f"a shared_storage_path (which holds {FOLDER}/), a job's folder in that, or a checkpoint's folder (which holds "
    f"{COMMIT})"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderContents:
    """The checkpoints at a path; ``jobs`` are folders of jobs, and there are none where the path is one checkpoint."""

    path: Path
    jobs: tuple[Path, ...] = ()

    @property
    def is_checkpoint(self) -> bool:
        return not self.jobs


def place_of(path: Path) -> FolderContents:
    """The checkpoints that ``path`` leads to; CheckpointNotFound says what is there instead.

    OSError where the folder cannot be read.
    """
    path = Path(os.path.abspath(path))
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        raise CheckpointNotFound(f"{path} does not exist; give {_WANTED}") from None
    except NotADirectoryError:
        raise CheckpointNotFound(f"{path} is no folder; give {_WANTED}") from None
    if COMMIT in names:
        return FolderContents(path=path)
    if FOLDER in names:
        path = path / FOLDER
        names = os.listdir(path)
    elif _is_job(names):
        return FolderContents(path=path, jobs=(path,))
    jobs = tuple(path / name for name in sorted(names) if _is_job_folder(path / name))
    if not jobs:
        raise CheckpointNotFound(_refusal(path, names))
    return FolderContents(path=path, jobs=jobs)


def one_checkpoint(place: FolderContents) -> Path:
    """The folder of the checkpoint that is meant: the newest one, where the place is a job's folder."""
    if place.is_checkpoint:
        return place.path
    if len(place.jobs) > 1:
        names = ", ".join(job.name for job in place.jobs)
        raise CheckpointNotFound(f"{place.path} holds several jobs; give the folder of one of them: {names}")
    listing = Listing.counting(place.jobs[0])
    newest: ListedCheckpoint | None = newest_of(listing.found)
    for error in listing.unreadable.values():
        if newest is None or not isinstance(error, CheckpointDamaged):  # of a newer format, or out of reach
            raise error
    if newest is not None:
        return newest.path
    raise CheckpointNotFound(f"{place.jobs[0]} holds no checkpoint that was completed")


def _is_job_folder(path: Path) -> bool:
    try:
        return _is_job(os.listdir(path))
    except NotADirectoryError:
        return False


def _is_job(names: list[str]) -> bool:
    return any(name in _HOLDERS or is_name(name) or is_set_aside(name) for name in names)


def _refusal(path: Path, names: list[str]) -> str:
    if is_name(path.name) or is_set_aside(path.name):
        return f"{path} holds no {COMMIT}: no checkpoint was completed there, or it is being removed"
    what = "is empty" if not names else f"holds no checkpoints of elastic_ext (but {', '.join(sorted(names)[:3])}, ...)"
    return f"{path} {what}; give {_WANTED}"


# --- what is said of a checkpoint in a few words, from its COMMIT alone ----------------------------------------------


def bytes_of(commit: Commit) -> int:
    """The size of a checkpoint's files, without those that checkpoints share."""
    return sum(commit.sizes().values())


def age_of(commit: Commit, now: float) -> float:
    """Seconds since a checkpoint was saved, as the clocks say of the machine that did and of this one."""
    return now - commit.saved_seconds


def layout_of(commit: Commit) -> str:
    """The ranks that a checkpoint is spread over, and the sharding if the run has noted it, in words."""
    sharding = commit.about.get("sharding")
    ranks = counted(commit.num_ranks, "rank")
    return f"{ranks}, {on_one_line(sharding)}" if isinstance(sharding, str) and sharding != "none" else ranks
