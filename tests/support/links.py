"""A real link between two nodes of a test: two network namespaces, a veth pair, and a rate that can be changed.

Needs root, and ``ip`` and ``tc`` (iproute2); ``why_no_links`` says what is missing.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

__all__ = ["Link", "link", "why_no_links"]

_BURST = "32kb"  # a smaller one freezes a link, since packets that wait are larger
_SECONDS = 30.0


def why_no_links() -> str | None:
    """Why no link can be made here, None where one can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} of iproute2 is missing"
    name = f"ex-{secrets.token_hex(3)}"
    try:
        _call("ip", "netns", "add", name)
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made: {error.stderr.strip()}"
    _call("ip", "netns", "del", name)
    return None


class Link:
    """Two hosts, numbered 0 and 1, and the one link that they have."""

    def __init__(self, rate: str) -> None:
        self._name = f"ex{secrets.token_hex(3)}"
        for host in (0, 1):
            _call("ip", "netns", "add", self._namespace(host))
            _call("ip", "-n", self._namespace(host), "link", "set", "lo", "up")
        ends = ("name", self.interface(1), "netns", self._namespace(1))
        _call("ip", "link", "add", self.interface(0), "netns", self._namespace(0), "type", "veth", "peer", *ends)
        for host in (0, 1):
            place = ("-n", self._namespace(host))
            _call("ip", *place, "addr", "add", f"{self.address(host)}/24", "dev", self.interface(host))
            _call("ip", *place, "link", "set", self.interface(host), "up")
        self.set_rate(rate)

    def address(self, host: int) -> str:
        return f"10.231.7.{host + 1}"

    def interface(self, host: int) -> str:
        """The name of the host's end of the link."""
        return f"{self._name}{'ab'[host]}"

    def within(self, host: int) -> Sequence[str]:
        """What a command begins with that is to run on a host."""
        return ("ip", "netns", "exec", self._namespace(host))

    def cut(self) -> None:
        """Nothing comes through any more, in neither direction, and nobody is told."""
        for host in (0, 1):
            self._queue(host, "blackhole")

    def mend(self) -> None:
        """Packets come through again, as fast as before."""
        self.set_rate(self._rate)

    def set_rate(self, rate: str) -> None:
        """Let so much through, such as "1mbit"."""
        self._rate = rate
        for host in (0, 1):
            self._queue(host, "tbf", "rate", rate, "burst", _BURST, "latency", "400ms")

    def close(self) -> None:
        for host in (0, 1):
            with suppress(subprocess.CalledProcessError):
                _call("ip", "netns", "del", self._namespace(host))

    def _namespace(self, host: int) -> str:
        return f"{self._name}-{'ab'[host]}"

    def _queue(self, host: int, *queue: str) -> None:
        """Have what a host sends go through another queue."""
        _call("tc", "-n", self._namespace(host), "qdisc", "replace", "dev", self.interface(host), "root", *queue)


@contextmanager
def link(rate: str = "400mbit") -> Iterator[Link]:
    """A link that goes with the test, with all that was started on its hosts before it."""
    made = Link(rate)
    try:
        yield made
    finally:
        made.close()


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
