"""The versions of a job's config as its master keeps them, and the streams on which nodes hear of them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.config.history import ConfigEdit, HistoryEntry, next_config, next_version, restored, undo_target
from elastic_ext.errors import ConfigError, Refusal

__all__ = ["Author", "AuthoredVersion", "ConfigBook", "ConfigStream", "ConfigStreams", "StaleVersion", "Unacknowledged"]


# --- the versions that a job's config has had, one after another, whoever wrote them ---------------------------------
# A version comes from a person who asks the master, from a node whose file was changed, or from the tuner (author
# "generated"). What the tuner decides is made from a version; where a newer one has come meanwhile, it is refused as
# stale. Nothing is taken back: an undo is a version too.

Author = Literal["person", "generated", "node"]
_MOST_KEPT = 200
_MOST_FILE_VERSION = 2**52  # the largest number taken from a node's file: half of the range, to leave others room


class StaleVersion(Exception):
    """A config version was made from one that is no longer the newest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AuthoredVersion:
    """One version of a job's config, with its author."""

    entry: HistoryEntry
    author: Author
    node_id: str = ""
    """The node whose config file the version came from; empty for other authors."""

    @property
    def config(self) -> ElasticConfig:
        return self.entry.config


class ConfigBook:
    """The newest versions of a job's config.

    ``propose``, ``propose_undo`` and ``propose_from_file`` make the next version and change nothing here; ``enter``
    adds it, once the caller has stored it.
    """

    def __init__(self, versions: Sequence[AuthoredVersion] = ()) -> None:
        self._versions = list(versions)
        self._text = self._versions[-1].config.to_json() if self._versions else ""
        self._conflicts: set[tuple[int, str]] = set()

    @property
    def versions(self) -> Sequence[AuthoredVersion]:
        """The newest config versions that are kept, oldest first."""
        return tuple(self._versions)

    @property
    def newest(self) -> AuthoredVersion | None:
        """The newest config version, which all nodes are to hold; None before there is one."""
        return self._versions[-1] if self._versions else None

    @property
    def version(self) -> int:
        """The number of the newest config version; 0 before there is one."""
        return self._versions[-1].config.version if self._versions else 0

    @property
    def text(self) -> str:
        """The text of the newest config version, as a config file has it; empty before there is one."""
        return self._text

    def enter(self, authored: AuthoredVersion) -> None:
        """Make ``authored`` the newest version, once it is stored."""
        assert authored.config.version > self.version, (authored.config.version, self.version)
        self._versions.append(authored)
        self._text = authored.config.to_json()
        self._conflicts.clear()
        del self._versions[:-_MOST_KEPT]

    def propose(
        self, edit: ConfigEdit, *, now: float, author: Author = "person", made_from: int | None = None
    ) -> AuthoredVersion:
        """The next version, as ``next_config`` makes it of ``edit``; it is not entered yet.

        Raises ConfigError for an invalid config, StaleVersion where ``made_from`` is given and is not the newest
        version.
        """
        if made_from is not None and made_from != self.version:
            raise StaleVersion(f"a change was made from version {made_from}, and version {self.version} is the newest")
        config = next_config([each.entry for each in self._versions], edit, version=self.version + 1)
        return AuthoredVersion(entry=HistoryEntry(time=now, config=config), author=author)

    def propose_undo(self, *, now: float, refused: Collection[str] = ()) -> AuthoredVersion:
        """The next version, with the content from before the newest one; it is not entered yet.

        Versions whose digest is ``refused`` are passed over. Raises ConfigError where no earlier content is known.
        """
        entries = [each.entry for each in self._versions]
        target = undo_target(entries, refused)
        config = restored(target, version=next_version(entries))
        return AuthoredVersion(entry=HistoryEntry(time=now, config=config, restores=target.origin), author="person")

    def propose_from_file(self, text: str, *, node_id: str, now: float) -> AuthoredVersion | None:
        """The config in a node's file as the next version, not entered yet; None where it is not newer.

        Raises ConfigError for an invalid config.
        """
        config = ElasticConfig.parse(text.encode(errors="surrogatepass"))
        if config.version <= self.version:
            return None
        if config.version > _MOST_FILE_VERSION:
            allowed = f"at most {_MOST_FILE_VERSION} from a file, so that others can come after it"
            advice = f"the next one is {self.version + 1}"
            raise ConfigError([Refusal(key="version", given=str(config.version), allowed=allowed, advice=advice)])
        return AuthoredVersion(entry=HistoryEntry(time=now, config=config), author="node", node_id=node_id)

    def conflict(self, version: int, digest: str, node_id: str) -> str | None:
        """A sentence, once, where a node holds the newest version number with other contents; else None."""
        newest = self.newest
        if newest is None or version != newest.config.version or digest in ("", newest.config.digest):
            return None
        if (version, node_id) in self._conflicts:
            return None
        self._conflicts.add((version, node_id))
        return (
            f"node {node_id} and the master have different configs under version {version}, and ranks that see both "
            f"apply neither; write the config that you want as version {version + 1}: `elastic-ext config set`"
        )


# --- the streams on which nodes are told of configs ------------------------------------------------------------------
# A node has one; what is sent on it must be held soon.
#
# There are thousands of them, each of which waits nearly always: what waits is a future that the stream itself awaits,
# with no task, coroutine or event of its own.


class Unacknowledged(Exception):
    """A node has not acknowledged a config that it was sent: its stream may be broken."""


class ConfigStream:
    """One agent's stream of configs: which version was sent, which is acknowledged, and when there is news.

    The call that serves it sends the newest config while ``take_news`` says so, else awaits ``rung``, until it
    ``is_over``.
    """

    __slots__ = ("_acknowledge_seconds", "_bell", "_deadline", "_held", "_newest", "_sent", "_timer", "is_over")

    def __init__(self, held_version: int, acknowledge_seconds: float) -> None:
        self.is_over = False
        self._sent = self._held = self._newest = held_version
        self._acknowledge_seconds = acknowledge_seconds
        self._deadline = 0.0
        self._bell: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def take_news(self, newest_version: int) -> bool:
        """Whether a newer version is to be sent now; it then counts as sent.

        Raises Unacknowledged where the one that was sent last was not acknowledged in time. Sending a newer version
        begins that time anew, whether or not the one before it was acknowledged.
        """
        now = asyncio.get_running_loop().time()
        self._newest = max(self._newest, newest_version)
        if self._sent < self._newest:
            self._sent, self._deadline = self._newest, now + self._acknowledge_seconds
            return True
        if self._is_owed and now >= self._deadline:
            raise Unacknowledged(
                f"version {self._sent} was sent {self._acknowledge_seconds:.0f} seconds ago, and this node has "
                "not said since that it holds it"
            )
        return False

    def rung(self) -> asyncio.Future[None]:
        """A future to await, done as soon as there may be news, an end, or a late acknowledgement."""
        loop = asyncio.get_running_loop()
        self._bell = loop.create_future()
        self._stop_timer()
        if self._is_owed:
            self._timer = loop.call_at(self._deadline, self._ring)
        return self._bell

    def tell(self, version: int) -> None:
        """Note a newer version, and wake the stream."""
        self._newest = max(self._newest, version)
        self._ring()

    def acknowledge(self, version: int) -> None:
        """Note that the node holds ``version``."""
        self._held = max(self._held, version)
        if not self._is_owed:
            self._stop_timer()

    def end(self) -> None:
        """End the stream."""
        self.is_over = True
        self._stop_timer()
        self._ring()

    @property
    def _is_owed(self) -> bool:
        """Whether the node has yet to acknowledge the version that was sent last."""
        return self._held < self._sent

    def _ring(self) -> None:
        if self._bell is not None and not self._bell.done():
            self._bell.set_result(None)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class ConfigStreams:
    """The streams of configs of all nodes, one for each."""

    def __init__(self, acknowledge_seconds: float) -> None:
        self._acknowledge_seconds = acknowledge_seconds
        self._by_node: dict[str, ConfigStream] = {}

    def begin(self, node_id: str, held_version: int) -> ConfigStream:
        """A new stream of a node, until ``forget``; an older stream of the node ends."""
        self.end(node_id)
        mine = self._by_node[node_id] = ConfigStream(held_version, self._acknowledge_seconds)
        return mine

    def forget(self, node_id: str, stream: ConfigStream) -> None:
        """End a stream that is not served any more, and forget it."""
        stream.end()
        if self._by_node.get(node_id) is stream:
            del self._by_node[node_id]

    def tell(self, version: int) -> None:
        """Note a newer version in all streams, and wake them."""
        for each in self._by_node.values():
            each.tell(version)

    def acknowledge(self, node_id: str, version: int) -> None:
        """Note in a node's stream that the node holds ``version``."""
        stream = self._by_node.get(node_id)
        if stream is not None:
            stream.acknowledge(version)

    def end(self, node_id: str) -> None:
        """End a node's stream, if it has one."""
        stream = self._by_node.get(node_id)
        if stream is not None:
            stream.end()

    def end_all(self) -> None:
        """End the streams of all nodes."""
        for each in self._by_node.values():
            each.end()
