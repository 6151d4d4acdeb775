"""ConfigHistory: the versions that a config file has had, in a file beside it, and how to go back.

Edits made by this module are written here; an edit made by hand is taken in at the next call. The config file itself
stays the only truth about what training should be doing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .config import ElasticConfig
from .errors import ConfigError, Refusal
from .files import exclusive, read_at_most, write_whole
from .strict_json import MAX_BYTES

__all__ = ["ConfigHistory", "Entry", "undone"]

_MOST_ENTRIES = 200
_MOST_BYTES = _MOST_ENTRIES * MAX_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One version that the file has had."""

    time: float
    """When it was written, or first seen; seconds since 1970."""
    config: ElasticConfig
    restores: int | None = None
    """The version whose content this is, where it came of an undo."""

    @property
    def origin(self) -> int:
        """The version in which this content was first written."""
        return self.config.version if self.restores is None else self.restores

    def to_json(self) -> str:
        return json.dumps({"time": self.time, "restores": self.restores, "config": self.config.to_dict()})

    @classmethod
    def from_json(cls, line: str) -> Entry:
        record = json.loads(line)
        return cls(time=record["time"], restores=record["restores"], config=ElasticConfig.from_dict(record["config"]))


def undone(entries: Sequence[Entry]) -> Entry:
    """The entry to go back to from the newest one: the content before it, further back at each undo in a row."""
    if entries:
        earlier = [entry for entry in entries if entry.restores is None and entry.origin < entries[-1].origin]
        if earlier:
            return earlier[-1]
    raise _refused("there is no earlier version to go back to", "a file with at least two versions")


class ConfigHistory:
    """The config file at ``path`` with its earlier versions. One writer at a time, among processes of one machine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._history = path.with_name(f".{path.name}.history")
        self._lock = path.with_name(f".{path.name}.lock")

    def current(self) -> ElasticConfig | None:
        """What the file holds, None where there is no file; ConfigError if it is refused."""
        try:
            return ElasticConfig.parse(read_at_most(self.path, MAX_BYTES))
        except FileNotFoundError:
            return None

    def entries(self) -> list[Entry]:
        """The versions so far, oldest first, with the file's present one."""
        return self._with_current(self._read(), self.current())

    def set(
        self, changes: Mapping[str, object], *, remove: Sequence[str] = (), reason: str, at_step: int | None = None
    ) -> ElasticConfig:
        """Write the next version: dotted keys changed or removed. Nothing is written when anything is refused."""
        with self._alone() as recorded:
            current = self.current()
            entries = self._with_current(recorded, current)
            values: dict[str, Any] = {} if current is None else dict(current.values())
            values.pop("checkpoint.now", None)  # it was for the version that introduced it
            for path in remove:
                if path not in values:
                    raise _refused(f"{path} is not in the file", f"one of {', '.join(values) or 'no key at all'}")
                del values[path]
            values.update(changes)
            new = ElasticConfig.from_values(values, version=_next_version(entries), reason=reason)
            return self._write(replace(new, apply_at_step=at_step), entries)

    def undo(self) -> ElasticConfig:
        """Write the content before the present one as a new version; in place of a refused file, the last good one."""
        with self._alone() as recorded:
            try:
                entries = self._with_current(recorded, self.current())
                target = undone(entries)
            except ConfigError:
                if not recorded or self._is_valid():
                    raise
                entries, target = recorded, recorded[-1]
            reason = f"back to version {target.origin}"
            new = replace(target.config, version=_next_version(entries), reason=reason, apply_at_step=None)
            return self._write(new, entries, restores=target.origin)

    @contextmanager
    def _alone(self) -> Iterator[list[Entry]]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(self._lock):
            yield self._read()

    def _read(self) -> list[Entry]:
        try:
            lines = read_at_most(self._history, _MOST_BYTES).decode(errors="replace").splitlines()
        except FileNotFoundError:
            return []
        entries = []
        for line in lines:
            try:
                entries.append(Entry.from_json(line))
            except (ValueError, KeyError, TypeError):  # a damaged line loses its own version only
                continue
        return entries

    def _with_current(self, entries: list[Entry], current: ElasticConfig | None) -> list[Entry]:
        if current is None or (entries and entries[-1].config.digest == current.digest):
            return entries
        return [*entries, Entry(time=time.time(), config=current)]

    def _is_valid(self) -> bool:
        try:
            self.current()
        except ConfigError:
            return False
        return True

    def _write(self, new: ElasticConfig, entries: list[Entry], restores: int | None = None) -> ElasticConfig:
        """The config file first: a history that lacks its newest version takes it in at the next call."""
        write_whole(self.path, new.to_json().encode())
        kept = [*entries, Entry(time=time.time(), config=new, restores=restores)][-_MOST_ENTRIES:]
        write_whole(self._history, "".join(entry.to_json() + "\n" for entry in kept).encode())
        return new


def _next_version(entries: Sequence[Entry]) -> int:
    return max((entry.config.version for entry in entries), default=0) + 1


def _refused(given: str, allowed: str) -> ConfigError:
    return ConfigError([Refusal(key="", given=given, allowed=allowed)])
