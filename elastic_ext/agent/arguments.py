"""The command line of elastic-run: its options, the combinations that are refused before anything starts, and the
environment that workers get.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.argparse_util import check_env, env
from torch.distributed.elastic.events.handlers import get_logging_handler
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import determine_local_world_size, get_args_parser, parse_min_max_nnodes

from elastic_ext.members.decision import CHOICES
from elastic_ext.version import VERSION

__all__ = [
    "OF_AGENT",
    "LaunchRefused",
    "WorkerPlace",
    "check_launch",
    "check_options",
    "devices_of",
    "environment_of",
    "parse",
    "parser",
    "seconds_in",
    "settings_in_words",
    "shutdown_seconds",
    "with_rendezvous",
    "with_start",
    "without_outer",
]


# --- the command line of elastic-run: torchrun's own, with what is said besides; and what came of it, in words -------

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
    found.add_argument("--version", action="version", version=f"elastic-run {VERSION}, torch {torch.__version__}")
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
        "config's tuning.mode comes before it; a master that was started otherwise has a --tuning of its own.",
    )
    own.add_argument(
        "--members",
        action=env,
        type=str,
        default="auto",
        help="How nodes join and leave: auto (the default): the workers of the others go on where the job can, else "
        "all workers are started anew; live: likewise, but a node that would need a restart waits; restart: all "
        "workers are always started anew.",
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
    """The options of elastic-run, from the command line or else from PET_... variables; ValueError for a bad flag."""
    try:
        made = parser()
    except ValueError:  # torch reads flags in the environment as it makes its parser
        flags = {name: environ[name] for name in _FLAGS if name in environ}
        bad = next((f"{name} is {value!r}" for name, value in flags.items() if value.strip() not in ("0", "1")), "")
        raise ValueError(f"{bad or 'a flag in the environment is no number'}; allowed: 0 or 1") from None
    return made.parse_args(arguments)


def with_rendezvous(options: argparse.Namespace) -> argparse.Namespace:
    """``options`` with the rendezvous settled: a node that need not find others gets one at a free local port."""
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
    """How long workers have to end by themselves before they are killed; ValueError for a value that is none."""
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
    """Every option that differs from its default, as NAME=VALUE, with the variable if it comes from the environment."""
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


# --- what a worker's environment says: torchrun's words, which scripts know, and those of this library ---------------

OF_AGENT = ("RUN_DIR", "CONFIG_FILE", "JOB", "STAGING_DIR", "PULSE_DIR", "SHUTDOWN_SECONDS", "SEAT", "JOINS")
"""The variables, without ELASTIC_EXT_, by which an agent tells its workers the job's name, paths, limits and seats, and
which membership plan they join."""
AT_START = Path(__file__).with_name("workers") / "at_start"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPlace:
    """The ranks of one worker among all workers of its job."""

    rank: int
    local_rank: int
    role_rank: int
    group_rank: int
    """The rank of the worker's node among the nodes of the round."""
    world_size: int
    local_world_size: int
    role_world_size: int
    group_world_size: int
    role: str
    master_addr: str
    master_port: int
    restart_count: int
    max_restarts: int
    run_id: str
    use_agent_store: bool


def environment_of(place: WorkerPlace) -> dict[str, str]:
    """The environment variables by which torchrun tells a worker its ranks, as RANK and WORLD_SIZE."""
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "ROLE_RANK": str(place.role_rank),
        "ROLE_NAME": place.role,
        "GROUP_RANK": str(place.group_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "ROLE_WORLD_SIZE": str(place.role_world_size),
        "GROUP_WORLD_SIZE": str(place.group_world_size),
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(place.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(place.max_restarts),
        "TORCHELASTIC_RUN_ID": place.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": str(place.use_agent_store),
    }


def devices_of(local_rank: int, *, visible: str | None, is_virtual: bool) -> dict[str, str]:
    """The environment variables that say which GPUs a worker sees: all, or with virtual local ranks its own one alone.

    ``visible`` is CUDA_VISIBLE_DEVICES as the agent has it. ValueError where no device is left for this worker.
    """
    if not is_virtual:
        return {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    if visible is None:
        return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": str(local_rank)}
    devices = visible.split(",")
    if local_rank >= len(devices):
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES is {visible!r}, and --virtual-local-rank needs one device for each worker: local "
            f"rank {local_rank} has none. Start fewer with --nproc-per-node, or make more devices visible"
        )
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": devices[local_rank].strip()}


def without_outer(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without the variables of an outer agent, for an agent that was started by that one's worker."""
    outer = {"TORCHELASTIC_RUN_ID", *(f"ELASTIC_EXT_{name}" for name in OF_AGENT)}
    return {name: value for name, value in environ.items() if name not in outer}


def with_start(environment: Mapping[str, str], path: str | None, agent_pid: int) -> dict[str, str]:
    """``environment`` with a PYTHONPATH that has Python run the ``at_start`` folder's sitecustomize before the script.

    ``path`` is PYTHONPATH as the agent has it.
    """
    return {
        **environment,
        "ELASTIC_EXT_AGENT_PID": str(agent_pid),
        "PYTHONPATH": str(AT_START) if not path else f"{AT_START}{os.pathsep}{path}",
    }


# --- what a command line can ask for and cannot be, said before anything is started ----------------------------------
# Torch checks some of it with assertions, some only once nodes have met, and some never.


class LaunchRefused(Exception):
    """The launcher cannot start a job as asked; the message says why."""


def check_options(options: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Check the options of elastic-run; ValueError for those that no job can have, but for what torch refuses well."""
    _check_nodes(options)
    _check_workers(options.nproc_per_node)
    if options.max_restarts < 0:
        raise ValueError(f"--max-restarts is {options.max_restarts}; allowed: an integer >= 0")
    if not 0 < options.monitor_interval < math.inf:
        raise ValueError(f"--monitor-interval is {options.monitor_interval}; allowed: seconds, a number > 0")
    if options.config_file is not None and options.config_file.is_dir():
        raise ValueError(
            f"--config-file is {str(options.config_file)!r}, which is a folder; allowed: a file, such as config.json"
        )
    if options.members not in CHOICES:
        raise ValueError(f"--members is {options.members!r}; allowed: {', '.join(CHOICES)}")
    try:
        get_logging_handler(options.event_log_handler)
    except KeyError:
        raise ValueError(
            f"--event-log-handler is {options.event_log_handler!r}, which nobody has registered; allowed: null, console"
        ) from None
    _check_script(options, environ)


def check_launch(launch: LaunchConfig, environ: Mapping[str, str]) -> None:
    """Check devices and times of a launch, once torch has read the options; ValueError for invalid ones."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    devices_of(launch.nproc_per_node - 1, visible=visible, is_virtual=getattr(launch, "virtual_local_rank", False))
    for name in ("read_timeout", "keep_alive_interval", "keep_alive_max_attempt"):
        seconds_in(launch, name, 1)


def seconds_in(launch: LaunchConfig, name: str, default: float) -> float:
    """The number that --rdzv-conf gives for ``name``, or ``default``; ValueError where it is no integer."""
    given = launch.rdzv_configs.get(name, default)
    try:
        return float(int(given))
    except (ValueError, OverflowError):
        raise ValueError(f"{name} in --rdzv-conf is {given!r}; allowed: an integer") from None


def _check_nodes(options: argparse.Namespace) -> None:
    try:
        least, most = parse_min_max_nnodes(options.nnodes)
    except (ValueError, RuntimeError):
        least = most = 0
    if not 1 <= least <= most:
        raise ValueError(f"--nnodes is {options.nnodes!r}; allowed: N, or MIN:MAX, integers >= 1, such as 2 or 1:4")
    if options.standalone and least > 1:
        raise ValueError(
            f"--standalone is given and --nnodes is {options.nnodes}: no other node can find this one, and it would "
            "wait for ever. Take --standalone out, and say where nodes meet: --rdzv-backend=c10d "
            "--rdzv-endpoint=HOST:PORT"
        )
    is_static = options.rdzv_backend == "static" and not options.standalone
    if is_static and (options.rdzv_endpoint or options.master_port) and not 0 <= options.node_rank < most:
        raise ValueError(
            f"--node-rank is {options.node_rank} of {most} nodes; allowed: an integer from 0 to {most - 1}"
        )


def _check_workers(given: str) -> None:
    why = ""
    try:
        number = determine_local_world_size(given)
    except ValueError as error:
        number, why = 0, f" ({error})"
    if number < 1:
        raise ValueError(
            f"--nproc-per-node is {given!r}{why}; allowed: an integer >= 1, auto, cpu, or gpu where there are some"
        )


def _check_script(options: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Check that the training script exists, as far as can be told from here; ValueError where it does not."""
    script = options.training_script
    if not script:
        raise ValueError("the script is '', as where a variable is not set; allowed: a file, or a module with -m")
    if options.no_python and not options.module and not options.run_path:
        if shutil.which(script) is None:
            raise ValueError(f"{script!r} is no program that can be run; allowed: an executable file, or one in PATH")
    elif not options.module or options.run_path:
        is_told_elsewhere = "PYTHON_EXEC" in environ or "$" in script or script.startswith("-")
        if not is_told_elsewhere and not os.path.exists(script):
            raise ValueError(
                f"the script {script!r} does not exist in {os.getcwd()}; allowed: a file, or a module with -m"
            )
