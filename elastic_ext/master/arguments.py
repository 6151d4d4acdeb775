"""The command line of a master, and the check of its options."""

from __future__ import annotations

import argparse
import ipaddress
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from elastic_ext.records.text import expanded
from elastic_ext.version import VERSION

from .tuning import Mode

__all__ = ["MasterOptions", "is_loopback", "parse"]

_MOST_PORT = 65535


@dataclass(frozen=True, kw_only=True, slots=True)
class MasterOptions:
    """The options that a master is started with; ValueError for those that exclude each other."""

    bind: str
    port: int
    """The port to listen at; 0 for any that is free."""
    port_file: Path | None
    state_dir: Path
    token_file: Path | None
    metrics_port: int | None
    tls_cert: Path | None
    tls_key: Path | None
    job: str
    """The name of the job; empty to take the name that the first agent gives."""
    lease_seconds: float
    """How long a node may be silent before it counts as lost."""
    beat_seconds: float
    """The time between two heartbeats of a node."""
    acknowledge_seconds: float
    """How long a node may take to say that a config it was sent is in its file."""
    refuse_bad_nodes: bool
    tuning: Mode
    lifeline: int | None
    """The descriptor of a pipe, if any: the master ends when the pipe's other end is closed."""

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("one of --tls-cert and --tls-key is given; allowed: both of them, or none")
        if not is_loopback(self.bind) and self.token_file is None:
            raise ValueError(
                f"--bind {self.bind} lets other machines in, and no token is asked of them; give --token-file"
            )
        if self.lease_seconds < 2 * self.beat_seconds:
            raise ValueError(
                f"--lease-seconds {self.lease_seconds:g} is less than two of --beat-seconds {self.beat_seconds:g}: "
                f"one lost beat would make a node count as lost; give at least {2 * self.beat_seconds:g}"
            )

    @property
    def warning(self) -> str:
        """A warning for the user of who can call this master, without a token or TLS; empty where none is due."""
        if self.token_file is None:
            return (
                "this master asks for no token: any user of this machine can set the config of the job, and speak for "
                "its nodes; give --token-file where the machine has other users"
            )
        if self.tls_cert is None and not is_loopback(self.bind):
            return (
                f"this master is reached at {self.bind} without TLS: whoever can listen to the network reads the token "
                "and can set the config of the job; give --tls-cert and --tls-key, or keep to a network of your own"
            )
        return ""


def parse(arguments: Sequence[str]) -> MasterOptions:
    """The options on a master's command line; argparse ends the process, with a sentence, for invalid ones."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        return MasterOptions(**vars(given))
    except ValueError as error:
        parser.error(str(error))


def is_loopback(address: str) -> bool:
    """Whether an address is reached from this machine alone."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return False


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m elastic_ext.master",
        description="The master of one job: it keeps the job's nodes, configs, events and metrics, and runs the tuner. "
        "Training goes on without it.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"elastic_ext.master {VERSION}")
    parser.add_argument("--port", type=_port, required=True, help="the port to listen at; 0 for any that is free")
    parser.add_argument(
        "--port-file", type=_path, help="the file to write the port into, once the master listens at it"
    )
    parser.add_argument("--state-dir", type=_path, required=True, help="a folder for its state alone, on a local disk")
    parser.add_argument("--token-file", type=_path, help="the file with the token that everybody has to give")
    parser.add_argument(
        "--bind", default="127.0.0.1", type=_address, help="the address to listen at (default: this machine alone)"
    )
    parser.add_argument("--metrics-port", type=_port, help="the port at which Prometheus reads metrics")
    parser.add_argument("--tls-cert", type=_path, help="a certificate, in PEM")
    parser.add_argument("--tls-key", type=_path, help="the key of that certificate, in PEM")
    parser.add_argument("--job", default="", help="what the job is called (default: what the first agent says)")
    parser.add_argument(
        "--lease-seconds",
        type=_seconds,
        default=30.0,
        help="how long a node may be silent before it counts as lost",
    )
    parser.add_argument("--beat-seconds", type=_seconds, default=10.0, help="the time between two heartbeats of a node")
    parser.add_argument(
        "--acknowledge-seconds",
        type=_seconds,
        default=5.0,
        help="how long a node may take to say that a config it was sent is in its file",
    )
    parser.add_argument(
        "--refuse-bad-nodes", action="store_true", help="keep out nodes whose machine has errors (elastic-ext doctor)"
    )
    parser.add_argument(
        "--tuning",
        choices=get_args(Mode),
        default="advise",
        help="what the tuner may do, where the config's tuning.mode does not say (default: advise)",
    )
    parser.add_argument("--lifeline", type=_descriptor, help=argparse.SUPPRESS)
    return parser


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) <= _MOST_PORT):
        raise argparse.ArgumentTypeError(f"{text!r} is given; allowed: 0 to {_MOST_PORT}")
    return int(text)


def _descriptor(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is given; allowed: a file descriptor")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.1 <= value <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is given; allowed: 0.1 to 86400 seconds")
    return value


def _address(text: str) -> str:
    if text == "localhost":
        return text
    try:
        return str(ipaddress.ip_address(text.strip("[]")))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is given; allowed: an address of this machine, such as 127.0.0.1, 0.0.0.0 or ::"
        ) from None


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("'' is given, as where a variable is not set; allowed: a path")
    try:
        return expanded(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
