"""The address of a job's master, with its token and certificate files, and the arguments by which commands name it."""

from __future__ import annotations

import argparse
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_ext.errors import in_words
from elastic_ext.records.agent import MASTER_FILE, MOST_BYTES, MasterRecord
from elastic_ext.records.files import read_at_most
from elastic_ext.records.json import MAX_BYTES
from elastic_ext.records.text import expanded

__all__ = [
    "MOST_BEAT_BYTES",
    "MOST_MESSAGE_BYTES",
    "Address",
    "MasterPlace",
    "add_master_arguments",
    "master_in",
    "named_master",
]


# --- where a master is, and what it takes to speak with it -----------------------------------------------------------

MOST_MESSAGE_BYTES = 4 << 20
"""The most bytes of any message to a master."""
MOST_BEAT_BYTES = MAX_BYTES + (256 << 10)
"""The most bytes of a beat, as of all messages with lists in them: a config, and 256 KiB for the rest. Lists of empty
messages take a hundred times their size once they are parsed."""

_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")
_ALLOWED = "HOST:PORT, such as node-1:29600, 10.0.0.1:29600 or [::1]:29600"
_MOST_PORT = 65535


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """A host, by its name or IP address, and a port."""

    host: str
    """The host name or IP address, without brackets."""
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """The address in ``HOST:PORT``; ValueError for anything else."""
        host, colon, port = text.rpartition(":")
        is_bracketed = host.startswith("[") and host.endswith("]")
        bare = host[1:-1] if is_bracketed else host
        is_host = _is_ipv6(bare) if is_bracketed else _NAME.fullmatch(bare) is not None
        if not colon or not is_host:
            raise ValueError(f"{text[:200]!r} is no address of a master; allowed: {_ALLOWED}")
        if not (port.isascii() and port.isdecimal() and 0 < int(port) <= _MOST_PORT):
            raise ValueError(
                f"the port of {text[:200]!r} is {port[:20]!r}; allowed: an integer from 1 to {_MOST_PORT}, as in "
                f"{_ALLOWED}"
            )
        return cls(host=bare, port=int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def target(self) -> str:
        """The address as a gRPC target, whose scheme keeps gRPC from a DNS lookup where the host is an IP address."""
        if ":" in self.host:
            return f"ipv6:{self}"
        return f"ipv4:{self}" if _is_ipv4(self.host) else f"dns:///{self}"


@dataclass(frozen=True, kw_only=True, slots=True)
class MasterPlace:
    """The address of a master, and the files that are needed to speak with it."""

    address: Address
    token_file: Path | None = None
    """The file with the master's token; None where the master wants none."""
    ca_file: Path | None = None
    """The file that the master's certificate is checked by; None for a connection that is not encrypted."""


def _is_ipv4(text: str) -> bool:
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return True


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


# --- which master a command means: by its arguments, or else by the environment that is handed in --------------------

_MASTER, _TOKEN_FILE = "ELASTIC_EXT_MASTER", "ELASTIC_EXT_TOKEN_FILE"


def add_master_arguments(
    parser: argparse._ActionsContainer,
    group: argparse._MutuallyExclusiveGroup | None = None,
    *,
    reads_environment: bool = True,
) -> None:
    """Add the arguments by which a command names a master; ``group`` is the exclusive group of ``--master``, if any.

    With ``reads_environment`` their help names the environment variables that ``named_master`` goes by without them.
    """
    master, token_file = (f" (default: {name})" if reads_environment else "" for name in (_MASTER, _TOKEN_FILE))
    (group or parser).add_argument(
        "--master",
        metavar="ADDR",
        help=f"HOST:PORT of a job's master, or the run directory of one of its agents{master}",
    )
    parser.add_argument("--token-file", help=f"the file with the master's token{token_file}")
    parser.add_argument(
        "--tls-ca", metavar="FILE", help="the file that the master's certificate is checked by, where it has one"
    )


def named_master(options: argparse.Namespace, environ: Mapping[str, str], *, is_other: bool) -> MasterPlace | None:
    """The master that a command means, by its arguments or the environment; None if none.

    ``is_other`` says that the arguments name something else than a master, so that the environment does not count.
    ValueError for what is no master.
    """
    given = options.master
    if given is None and not is_other:
        given = environ.get(_MASTER) or None
    if given is None:
        return None
    folder = expanded(given)
    if "/" in given or folder.is_dir():
        return master_in([folder], options, environ)
    token_file, ca_file = options.token_file or environ.get(_TOKEN_FILE), options.tls_ca
    return MasterPlace(address=Address.parse(given), token_file=_path(token_file), ca_file=_path(ca_file))


def master_in(folders: Sequence[Path], options: argparse.Namespace, environ: Mapping[str, str]) -> MasterPlace:
    """The master whose address an agent has written into its run directory, one of ``folders``; ValueError if none."""
    folder = next((each for each in folders if (each / MASTER_FILE).exists()), folders[0])
    try:
        record = MasterRecord.from_json(read_at_most(folder / MASTER_FILE, MOST_BYTES).decode())
    except FileNotFoundError:
        raise ValueError(
            f"{folder} has no {MASTER_FILE}: its agent has found no master, or has ended; allowed: HOST:PORT, or the "
            "run directory of an agent with a master"
        ) from None
    except OSError as error:
        raise ValueError(f"{folder / MASTER_FILE} cannot be read: {in_words(error)}") from None
    except ValueError as error:
        raise ValueError(f"{folder / MASTER_FILE} is damaged: {error}") from None
    return MasterPlace(
        address=Address.parse(record.address),
        token_file=_path(options.token_file or record.token_file or environ.get(_TOKEN_FILE)),
        ca_file=_path(options.tls_ca or record.ca_file),
    )


def _path(given: str | None) -> Path | None:
    return expanded(given) if given else None
