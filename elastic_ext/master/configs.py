"""ConfigBook: the versions that a job's config has had, one after another, whoever wrote them. Pure.

A version comes from a person who asks the master, from a node whose file was changed, or from what generates
strategies. What is generated is made from a version; where a newer one has come meanwhile, a person's say, it is late
and refused. Nothing is taken back: an undo is a version too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.config.history import Entry, edited, next_version, restored, undone
from elastic_ext.errors import ConfigError, Refusal

__all__ = ["Author", "ConfigBook", "Late", "Page"]

Author = Literal["person", "generated", "node"]
_MOST_PAGES = 200
_MOST_VERSION = 2**52  # of what a node's file may begin with: half of all that there are


class Late(Exception):
    """A version was made from one that is no longer the newest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """One version, and who wrote it."""

    entry: Entry
    author: Author
    node_id: str = ""
    """Whose file it came from, if any."""

    @property
    def config(self) -> ElasticConfig:
        return self.entry.config


class ConfigBook:
    """The pages so far. What makes a page gives it back without entering it: it is entered once it is stored."""

    def __init__(self, pages: Sequence[Page] = ()) -> None:
        self._pages = list(pages)
        self._text = self._pages[-1].config.to_json() if self._pages else ""
        self._conflicts: set[tuple[int, str]] = set()

    @property
    def pages(self) -> Sequence[Page]:
        """The newest of them, oldest first."""
        return tuple(self._pages)

    @property
    def newest(self) -> Page | None:
        """What all nodes are to have; None before there is any."""
        return self._pages[-1] if self._pages else None

    @property
    def version(self) -> int:
        """Of the newest; 0 before there is any."""
        return self._pages[-1].config.version if self._pages else 0

    @property
    def text(self) -> str:
        """Of the newest, as a file has it: made once, as all nodes are sent it; empty before there is any."""
        return self._text

    def enter(self, page: Page) -> None:
        """This is the newest one now."""
        assert page.config.version > self.version, (page.config.version, self.version)
        self._pages.append(page)
        self._text = page.config.to_json()
        self._conflicts.clear()
        del self._pages[:-_MOST_PAGES]

    def set(
        self,
        changes: Mapping[str, object],
        *,
        remove: Sequence[str],
        reason: str,
        at_step: int | None,
        now: float,
        author: Author = "person",
        made_from: int | None = None,
    ) -> Page:
        """The next version, from the newest. ConfigError; Late where it was ``made_from`` another one."""
        if made_from is not None and made_from != self.version:
            raise Late(f"this was made from version {made_from}, and version {self.version} is the newest now")
        current = self.newest.config if self.newest else None
        version = self.version + 1
        config = edited(current, changes, remove=remove, version=version, reason=reason, at_step=at_step)
        ElasticConfig.parse(config.to_json().encode())  # values that are allowed one by one can make too large a file
        return Page(entry=Entry(time=now, config=config), author=author)

    def undo(self, *, now: float) -> Page:
        """The content before the newest one, as the next version. ConfigError."""
        entries = [each.entry for each in self._pages]
        target = undone(entries)
        config = restored(target, version=next_version(entries))
        return Page(entry=Entry(time=now, config=config, restores=target.origin), author="person")

    def found(self, text: str, *, node_id: str, now: float) -> Page | None:
        """What a node has in its file, if that is newer than what is known. ConfigError."""
        config = ElasticConfig.parse(text.encode(errors="surrogatepass"))
        if config.version <= self.version:
            return None
        if config.version > _MOST_VERSION:
            allowed = f"at most {_MOST_VERSION} from a file, so that others can come after it"
            advice = f"the next one is {self.version + 1}"
            raise ConfigError([Refusal(key="version", given=str(config.version), allowed=allowed, advice=advice)])
        return Page(entry=Entry(time=now, config=config), author="node", node_id=node_id)

    def conflict(self, version: int, digest: str, node_id: str) -> str | None:
        """Where a node has other contents under the newest version: the sentence that says so, once."""
        newest = self.newest
        if newest is None or version != newest.config.version or digest in ("", newest.config.digest):
            return None
        if (version, node_id) in self._conflicts:
            return None
        self._conflicts.add((version, node_id))
        return (
            f"node {node_id} has other contents under version {version} than the master; no rank takes either where "
            f"they meet: put one content under version {version + 1}"
        )
