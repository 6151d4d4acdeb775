"""What a command line can ask for and cannot be, said before anything is started.

Torch checks some of it with assertions, some only once nodes have met, and some never.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
from collections.abc import Mapping

from torch.distributed.elastic.events.handlers import get_logging_handler
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import determine_local_world_size, parse_min_max_nnodes

from .environment import devices_of

__all__ = ["Refused", "check_launch", "check_options", "seconds_in"]


class Refused(Exception):
    """This cannot be started as asked; it says why."""


def check_options(options: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """ValueError for options that no job can have. What torch refuses in good words is left to it."""
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
    try:
        get_logging_handler(options.event_log_handler)
    except KeyError:
        raise ValueError(
            f"--event-log-handler is {options.event_log_handler!r}, which nobody has registered; allowed: null, console"
        ) from None
    _check_script(options, environ)


def check_launch(launch: LaunchConfig, environ: Mapping[str, str]) -> None:
    """ValueError for devices and times that cannot be, once torch has made out what was given."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    devices_of(launch.nproc_per_node - 1, visible=visible, is_virtual=getattr(launch, "virtual_local_rank", False))
    for name in ("read_timeout", "keep_alive_interval", "keep_alive_max_attempt"):
        seconds_in(launch, name, 1)


def seconds_in(launch: LaunchConfig, name: str, default: float) -> float:
    """A number of --rdzv-conf."""
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
    """That there is one, as far as can be told from here."""
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
