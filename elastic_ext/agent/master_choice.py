"""Which master an agent is to have, as its command line says: one that runs somewhere, its own, or none."""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from elastic_ext.errors import in_words
from elastic_ext.master.places import Address, MasterPlace
from elastic_ext.master.tokens import read_token
from elastic_ext.master.tuning_words import Mode
from elastic_ext.ranks.deadlines import Backoff
from elastic_ext.records.files import read_at_most
from elastic_ext.records.text import expanded, on_one_line

from .journal import Journal
from .master_link import GivenMaster, MasterLink
from .node_identity import NodeSelf, next_incarnation, node_id_of
from .own_master import OwnMaster
from .tuner import ConfigTuner

__all__ = ["MasterChoice", "link_with", "master_choice", "tuning_mode"]

MasterChoice = MasterPlace | Literal["own", "none"]
_OFF = "off"
_MODES: Mapping[str, Mode] = {"off": "off", "advise": "advise", "auto": "auto"}
_MOST_NAME = 200
_FIRST_SECONDS, _MOST_SECONDS = 0.2, 30.0


def master_choice(options: argparse.Namespace) -> MasterChoice:
    """What ``options`` ask for; ValueError for an address, a token or a certificate that cannot be used."""
    if options.master is None:
        _check_alone(options)
        return "own" if options.standalone else "none"
    if options.master.strip().lower() == _OFF:
        return "none"
    try:
        address = Address.parse(options.master)
    except ValueError as error:
        raise ValueError(f"--master: {error}; and off, for none") from None
    token_file = None if options.token_file is None else expanded(options.token_file).absolute()
    ca_file = None if options.master_ca is None else expanded(options.master_ca).absolute()
    if token_file is not None:
        read_token(token_file)
    if ca_file is not None:
        try:
            read_at_most(ca_file, 0)
        except OSError as error:
            raise ValueError(f"--master-ca cannot be read: {in_words(error)}") from None
    return MasterPlace(address=address, token_file=token_file, ca_file=ca_file)


def _check_alone(options: argparse.Namespace) -> None:
    """What is of a master that is named, and none is: somebody believes that this job has one, or is encrypted."""
    given = {"--token-file": options.token_file, "--master-ca": options.master_ca}
    names = [name for name, value in given.items() if value is not None]
    if names:
        verb = "is" if len(names) == 1 else "are"
        other = "; the master of --standalone has a token of its own" if options.standalone else ""
        raise ValueError(
            f"{' and '.join(names)} {verb} given, and no --master that would be spoken to with it{other}; give "
            "--master HOST:PORT as well, or --master off where there is to be none"
        )


def tuning_mode(options: argparse.Namespace, choice: MasterChoice) -> Mode:
    """What the tuner of the agent's own master may do; ValueError where something else was asked for."""
    given = options.tuning
    if given is None:
        return "advise"
    found = _MODES.get(given.strip().lower())
    if found is None:
        raise ValueError(f"--tuning is {given!r}; allowed: {', '.join(_MODES)}")
    if choice == "none" and found != "off":
        raise ValueError(
            f"--tuning is {found}, and there is no master that could tune; --standalone starts one, --master names one"
        )
    if isinstance(choice, MasterPlace):
        raise ValueError(
            f"--tuning is {found}, and the master at {choice.address} has been told by itself; leave it out, and give "
            "--tuning to that one, or set tuning.mode in the config"
        )
    return found


def link_with(
    choice: MasterChoice,
    run_dir: Path,
    tuner: ConfigTuner,
    journal: Journal,
    *,
    job: str,
    agent_id: str,
    host: str,
    library: str,
    started_at: float,
    tuning: Mode = "advise",
) -> MasterLink | None:
    """The link of an agent that begins now; None where there is to be no master. ``tuning`` is for its own."""
    if choice == "none":
        return None
    job = on_one_line(job)[:_MOST_NAME].encode(errors="replace").decode()  # as masters know it
    node = NodeSelf(
        node_id=node_id_of(run_dir, host),
        incarnation=next_incarnation(run_dir, now_ns=time.time_ns()),
        host=host,
        pid=os.getpid(),
        library=library,
        started_at=started_at,
        job=job,
        agent_id=agent_id,
    )
    if choice == "own":
        chance = random.Random(f"{node.node_id}/{node.incarnation}/own")
        backoff = Backoff(chance, first_seconds=_FIRST_SECONDS, most_seconds=_MOST_SECONDS)
        own = OwnMaster(run_dir, job, journal, backoff, tuning=tuning)
        return MasterLink(run_dir, node, own, tuner, journal)
    return MasterLink(run_dir, node, GivenMaster(choice), tuner, journal)
