"""Which master a command means: by its arguments, or else by the environment that is handed in."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from elastic_ext.errors import in_words
from elastic_ext.records.agent import MASTER_FILE, MOST_BYTES, MasterRecord
from elastic_ext.records.files import read_at_most
from elastic_ext.records.text import expanded

from .places import Address, MasterPlace

__all__ = ["add_ways", "named_master"]

_MASTER, _TOKEN_FILE = "ELASTIC_EXT_MASTER", "ELASTIC_EXT_TOKEN_FILE"


def add_ways(
    parser: argparse._ActionsContainer,
    group: argparse._MutuallyExclusiveGroup | None = None,
    *,
    reads_environment: bool = True,
) -> None:
    """The arguments; ``group`` is what ``--master`` is one of."""
    master, token_file = (f" (default: {name})" if reads_environment else "" for name in (_MASTER, _TOKEN_FILE))
    (group or parser).add_argument(
        "--master",
        metavar="ADDR",
        help=f"HOST:PORT of a job's master, or the run directory of one of its agents{master}",
    )
    parser.add_argument("--token-file", help=f"the file with the token that it wants{token_file}")
    parser.add_argument("--tls-ca", metavar="FILE", help="what its certificate is checked by, where it has one")


def named_master(options: argparse.Namespace, environ: Mapping[str, str], *, is_other: bool) -> MasterPlace | None:
    """The master that is meant, None if none is; ``is_other`` where the arguments name something else than a master.

    ValueError for what is no master.
    """
    given = options.master
    if given is None and not is_other:
        given = environ.get(_MASTER) or None
    if given is None:
        return None
    folder = expanded(given)
    if "/" in given or folder.is_dir():
        return _in_run_directory(folder, options, environ)
    token_file, ca_file = options.token_file or environ.get(_TOKEN_FILE), options.tls_ca
    return MasterPlace(address=Address.parse(given), token_file=_path(token_file), ca_file=_path(ca_file))


def _in_run_directory(folder: Path, options: argparse.Namespace, environ: Mapping[str, str]) -> MasterPlace:
    """The one that the agent of ``folder`` speaks with."""
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
