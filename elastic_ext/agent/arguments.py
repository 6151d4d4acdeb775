"""The command line of elastic-run: torchrun's own, with what is said besides; and what came of it, in words."""

from __future__ import annotations

import argparse
import contextlib
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.distributed.argparse_util import check_env, env
from torch.distributed.run import get_args_parser, parse_min_max_nnodes

__all__ = ["parse", "parser", "settings_in_words", "shutdown_seconds", "with_rendezvous"]

_PREFIX = "PET_"  # torchrun's, of the environment
_DEFAULT_PORT = 29500
_SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # torch's
_SHUTDOWN_SECONDS = 30
_FLAGS = [
    f"{_PREFIX}{name}"
    for name in ("STANDALONE", "MODULE", "NO_PYTHON", "RUN_PATH", "VIRTUAL_LOCAL_RANK", "USE_ENV", "NODE_CHECK")
]


def parser() -> argparse.ArgumentParser:
    """Torchrun's parser, with the options of this launcher."""
    found: argparse.ArgumentParser = get_args_parser()
    found.prog = "elastic-run"
    found.description = "Start the workers of a training job on this machine, watch them, and say what becomes of them."
    own = found.add_argument_group("elastic_ext")
    own.add_argument(
        "--job",
        action=env,
        type=str,
        default=None,
        help="What the job is called, for its files; by default --rdzv-id, or the script.",
    )
    own.add_argument(
        "--config-file",
        "--config_file",
        action=env,
        type=Path,
        default=None,
        help="The config file that the workers of this node follow; by default config.json in the run directory.",
    )
    own.add_argument(
        "--node-check",
        "--node_check",
        action=check_env,
        help="Look at this machine first, as `elastic-ext doctor` does, and do not start where something is wrong.",
    )
    own.add_argument(
        "--hang-seconds",
        "--hang_seconds",
        action=env,
        type=str,
        default="auto",
        help="A step that takes longer is a hang, and workers are restarted: seconds, off, or auto (the default): ten "
        "times what the slowest steps took, and no less than 30.",
    )
    own.add_argument(
        "--master",
        action=env,
        type=str,
        default=None,
        help="HOST:PORT of the job's master, or off. By default there is none, and with --standalone one is started.",
    )
    own.add_argument(
        "--token-file",
        "--token_file",
        action=env,
        type=Path,
        default=None,
        help="The file with the token that the master wants; readable by its owner alone.",
    )
    own.add_argument(
        "--master-ca",
        "--master_ca",
        action=env,
        type=Path,
        default=None,
        help="What the master's certificate is checked by, where it has one: a file in PEM.",
    )
    own.add_argument(
        "--tuning",
        action=env,
        type=str,
        default=None,
        help="What the tuner of the master that this launcher starts may do: off, advise (the default) or auto. The "
        "config's tuning.mode comes before it; another master has been told by itself.",
    )
    with contextlib.suppress(argparse.ArgumentError):  # torch 2.13 has it, 2.11 has not
        found.add_argument(
            "--shutdown-timeout",
            "--shutdown_timeout",
            action=env,
            type=int,
            default=None,
            help="How many seconds workers have to end by themselves before they are killed; by default "
            f"{_SHUTDOWN_VARIABLE}, or {_SHUTDOWN_SECONDS}.",
        )
    if found.get_default("master_port") == _DEFAULT_PORT:  # in 2.11 it cannot be told whether somebody has asked for it
        found.set_defaults(master_port=None)
    return found


def parse(arguments: Sequence[str], environ: Mapping[str, str]) -> argparse.Namespace:
    """What was given, in the environment (PET_...) or, first of all, on the command line; ValueError for a bad flag."""
    try:
        made = parser()
    except ValueError:  # torch reads flags in the environment as it makes its parser
        flags = {name: environ[name] for name in _FLAGS if name in environ}
        bad = next((f"{name} is {value!r}" for name, value in flags.items() if value.strip() not in ("0", "1")), "")
        raise ValueError(f"{bad or 'a flag in the environment is no number'}; allowed: 0 or 1") from None
    return made.parse_args(arguments)


def with_rendezvous(options: argparse.Namespace) -> argparse.Namespace:
    """``options`` with the rendezvous that they mean: nodes that need not find each other get one of their own."""
    found = argparse.Namespace(**vars(options))
    is_alone = (
        found.rdzv_backend == "static"
        and not found.rdzv_endpoint
        and found.master_port is None
        and parse_min_max_nnodes(found.nnodes)[1] == 1
    )
    if found.standalone or is_alone:
        found.rdzv_backend, found.rdzv_endpoint, found.rdzv_id = "c10d", "localhost:0", str(uuid.uuid4())
    if found.master_port is None:
        found.master_port = _DEFAULT_PORT
    if not found.rdzv_id:  # torchrun makes one up too
        found.rdzv_id = str(uuid.uuid4())
    return found


def shutdown_seconds(options: argparse.Namespace, environ: Mapping[str, str]) -> float:
    """How long workers have to end by themselves."""
    given = options.shutdown_timeout
    if given is None:
        given = environ.get(_SHUTDOWN_VARIABLE, _SHUTDOWN_SECONDS)
    try:
        seconds = int(given)
    except ValueError:
        raise ValueError(f"{_SHUTDOWN_VARIABLE} is {given!r}: a whole number of seconds is allowed") from None
    if seconds < 0:
        raise ValueError(f"--shutdown-timeout is {seconds}: 0 or more seconds are allowed")
    return float(seconds)


def settings_in_words(options: argparse.Namespace, environ: Mapping[str, str]) -> list[str]:
    """Every setting that is not as it is by default, with where it comes from."""
    words = []
    plain = parser()
    for name, value in sorted(vars(options).items()):
        if name in ("training_script", "training_script_args"):
            continue
        variable = f"{_PREFIX}{name.upper()}"
        in_environment = environ.get(variable)
        if in_environment is not None and str(value) == str(plain.get_default(name)):
            words.append(f"{name}={value} ({variable})")
        elif value != plain.get_default(name):
            words.append(f"{name}={value}")
    return words
