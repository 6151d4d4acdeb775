"""Where a master is, and what it takes to speak with it: pure."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

from elastic_ext.records.json import MAX_BYTES

__all__ = ["MOST_BEAT_BYTES", "MOST_MESSAGE_BYTES", "Address", "MasterPlace"]

MOST_MESSAGE_BYTES = 4 << 20
"""Of what a master is sent, whatever it is."""
MOST_BEAT_BYTES = MAX_BYTES + (256 << 10)
"""Of a Beat, as of all messages with lists in them: a config, and as much else as there is of a node. Lists of nothing
take a hundred times their size once they are parsed."""

_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")
_ALLOWED = "HOST:PORT, such as node-1:29600, 10.0.0.1:29600 or [::1]:29600"
_MOST_PORT = 65535


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """A machine, by its name or number, and a port of it."""

    host: str
    """Without brackets."""
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """``HOST:PORT``; ValueError for anything else."""
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
        """As gRPC has it: numbers are looked up nowhere."""
        if ":" in self.host:
            return f"ipv6:{self}"
        return f"ipv4:{self}" if _is_ipv4(self.host) else f"dns:///{self}"


@dataclass(frozen=True, kw_only=True, slots=True)
class MasterPlace:
    """A master, and by what it is spoken to."""

    address: Address
    token_file: Path | None = None
    """None where it wants no token."""
    ca_file: Path | None = None
    """What its certificate is checked by; None where it has none, and nothing is encrypted."""


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
