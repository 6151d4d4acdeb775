"""elastic-ext doctor: what is wrong with this machine, and, with rendezvous arguments, with pairs of nodes.

torch is imported where nodes are to meet, and not before.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from elastic_ext.master.address import add_master_arguments, named_master
from elastic_ext.records.run_dir import StartSettings
from elastic_ext.records.text import expanded

from .ckpt import Terminal, path_of

__all__ = ["FINE", "WRONG", "add_doctor", "run_doctor"]

FINE = 0
WRONG = 1
"""Exit status where there is a warning or an error."""
_WITH_OTHERS = "doctor_pairs"  # imports torch
_RENDEZVOUS = ("nnodes", "rdzv_id", "rdzv_backend", "rdzv_conf", "node_rank", "local_addr", "pair_backend", "silence")


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the arguments of ``elastic-ext doctor``, which ``run_doctor`` does."""
    parser.description = "Check this machine, and say in words what is wrong with it and what to do."
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument(
        "--path",
        action="append",
        default=[],
        type=path_of,
        metavar="P",
        help="look at the file system there too: of checkpoints, of data; may be given several times",
    )
    parser.add_argument(
        "--run-dir",
        type=path_of,
        metavar="DIR",
        help="the run directory; default: ELASTIC_EXT_RUN_DIR, or where those of jobs are by default",
    )
    pairs = parser.add_argument_group(
        "pairs of nodes",
        "Started on several nodes at the same time with the same arguments, as torchrun has them: the nodes measure "
        "how fast each computes, and how fast every two of them exchange data.",
    )
    pairs.add_argument(
        "--rdzv-endpoint", "--rdzv_endpoint", metavar="HOST:PORT", help="where the nodes meet; PORT is 29400 by default"
    )
    pairs.add_argument("--nnodes", metavar="N or MIN:MAX", type=_num_nodes, help="how many nodes come")
    pairs.add_argument("--rdzv-id", "--rdzv_id", metavar="ID", help="the id that the nodes share; default: none")
    pairs.add_argument(
        "--rdzv-backend", "--rdzv_backend", metavar="NAME", help="torch's backend by which they meet; default: c10d"
    )
    pairs.add_argument(
        "--rdzv-conf",
        "--rdzv_conf",
        metavar="K=V,...",
        type=_config,
        help="settings of the rendezvous, such as join_timeout=60: so many seconds to wait for all",
    )
    pairs.add_argument(
        "--node-rank", "--node_rank", type=_count, metavar="N", help="rank of this node, where the backend is static"
    )
    add_master_arguments(pairs, reads_environment=False)
    pairs.add_argument(
        "--local-addr", "--local_addr", metavar="ADDRESS", help="the address by which other nodes reach this one"
    )
    pairs.add_argument(
        "--pair-backend",
        choices=("gloo", "nccl"),
        help="what exchanges data: gloo through the CPUs (default), or nccl between GPUs, where both nodes have some",
    )
    pairs.add_argument(
        "--silence",
        type=_seconds,
        metavar="SECONDS",
        help="a node that says nothing for so long has stopped answering; default: 15",
    )
    parser.set_defaults(refuse=parser.error)


def run_doctor(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Check this machine, and pairs of nodes if that is asked for; gives the exit status."""
    terminal = Terminal(sys.stdout, sys.stderr, as_json=options.json)
    try:
        options.place = named_master(options, {}, is_other=False)
    except ValueError as error:
        options.refuse(str(error))
    if options.place is not None and options.rdzv_endpoint is None:
        options.refuse(
            "--master is given and --rdzv-endpoint is not; add --rdzv-endpoint HOST:PORT, where the nodes are to meet: "
            "the master is sent what pairs of nodes have measured"
        )
    if options.rdzv_endpoint is None:
        for name in _RENDEZVOUS:
            if getattr(options, name) is not None:
                options.refuse(
                    f"--{name.replace('_', '-')} is given and --rdzv-endpoint is not; add --rdzv-endpoint HOST:PORT, "
                    "where the nodes are to meet"
                )
    elif options.nnodes is None:
        options.refuse("--rdzv-endpoint is given and --nnodes is not; add --nnodes N, how many nodes come")
    return _check(options, environ, terminal)


def _check(options: argparse.Namespace, environ: Mapping[str, str], terminal: Terminal) -> int:
    from elastic_ext.doctor.findings import findings, is_wrong, tell_findings
    from elastic_ext.doctor.hardware import look  # loads what the other commands can do without

    try:
        run_dir = _run_dir(options.run_dir, environ)
    except ValueError as error:
        options.refuse(f"the run directory: {error}")
    hardware = look(options.path, run_dir=run_dir)
    num_nodes = options.nnodes[1] if options.nnodes else 1
    found = findings(hardware, num_nodes=num_nodes)
    if options.json:
        terminal.tell({"record": "hardware", **asdict(hardware)}, "")
    terminal.say(f"{hardware.network.host}:")
    tell_findings(terminal, found, "node")
    is_bad = is_wrong(found)
    if options.rdzv_endpoint is not None:
        sys.stdout.flush()
        is_bad |= bool(importlib.import_module(f".{_WITH_OTHERS}", __package__).run(options, terminal, hardware))
    return WRONG if is_bad else FINE


def _run_dir(given: Path | None, environ: Mapping[str, str]) -> Path:
    """The run directory that is given or set, or else the folder that has those of jobs by default; ValueError."""
    named = given or environ.get("ELASTIC_EXT_RUN_DIR")
    return expanded(named) if named else StartSettings.jobs_folder(environ)


def _num_nodes(text: str) -> tuple[int, int]:
    least, colon, most = text.partition(":")
    if not least.isdecimal() or (colon and not most.isdecimal()) or not 1 <= int(least) <= int(most or least):
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is given; allowed: N, or MIN:MAX, integers >= 1, such as 2 or 2:4"
        )
    return int(least), int(most or least)


def _config(text: str) -> dict[str, str | int]:
    config: dict[str, str | int] = {}
    for pair in text.split(","):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not key or not equals or not value:
            raise argparse.ArgumentTypeError(f"{text[:80]!r} is given; allowed: KEY=VALUE,..., such as join_timeout=60")
        is_number = value.isascii() and value.isdecimal()
        if key.endswith("_timeout") and not is_number:
            raise argparse.ArgumentTypeError(f"{key} is {value[:40]!r}; allowed: seconds, an integer >= 1")
        config[key] = int(value) if is_number else value
    return config


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is given; allowed: an integer >= 0")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is given; allowed: seconds, from 1 to 86400")
    return seconds
