"""ConfigHistory: the versions that a config file has had, in a file beside it, and how to go back.

Edits made by this module are written here; an edit made by hand is taken in at the next call. The config file itself
stays the only truth about what training should be doing.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from elastic_ext.errors import ConfigError, Refusal
from elastic_ext.records.files import exclusive, make_folder, read_at_most, try_lock, write_whole
from elastic_ext.records.json import MAX_BYTES

from .elastic_config import ElasticConfig

__all__ = [
    "CONFIG_EVENTS",
    "UNSET",
    "ConfigEdit",
    "ConfigHistory",
    "HistoryEntry",
    "next_config",
    "next_version",
    "refused_in",
    "restored",
    "undo_target",
    "unset_values",
]

_logger = logging.getLogger(__name__)

_MOST_ENTRIES = 200
_MOST_BYTES = _MOST_ENTRIES * MAX_BYTES
_LATEST = 1e11  # seconds since 1970; what lies beyond is no date
_POLL_SECONDS = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryEntry:
    """One version that the config file has had."""

    time: float
    """When this version was written, or first seen, in seconds since 1970."""
    config: ElasticConfig
    restores: int | None = None
    """The version whose content an undo put back as this one; None where this is no undo."""

    @property
    def origin(self) -> int:
        """The version in which this content was first written."""
        return self.config.version if self.restores is None else self.restores

    def to_json(self) -> str:
        return json.dumps({"time": self.time, "restores": self.restores, "config": self.config.to_dict()})

    @classmethod
    def from_json(cls, line: str) -> HistoryEntry:
        """The entry that ``to_json`` gave; ValueError, such as a ConfigError, if the line holds anything else."""
        try:
            record = json.loads(line)
            seconds, restores, config = record["time"], record["restores"], record["config"]
        except (KeyError, TypeError, RecursionError):
            raise ValueError("the line is no entry of a config history") from None
        if not (isinstance(seconds, (int, float)) and 0 <= seconds < _LATEST and isinstance(config, dict)):
            raise ValueError("the line is no entry of a config history")
        if restores is not None and type(restores) is not int:
            raise ValueError("the line is no entry of a config history")
        return cls(time=float(seconds), restores=restores, config=ElasticConfig.from_dict(config))


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigEdit:
    """A request for the next version of a config: what to change and to remove, why, and from which step on."""

    changes: Mapping[str, Any] = field(default_factory=dict, kw_only=False)
    """The new values by dotted key, such as ``dataloader.batch_size``."""
    remove: tuple[str, ...] = ()
    """Dotted keys to remove, which then have their start-up values."""
    reason: str = ""
    at_step: int | None = None
    refused: tuple[str, ...] = ()
    """The digests of versions that the ranks of the job have refused: the next version is not made from them."""
    above: int = 0
    """A version that the next one exceeds, such as that in force where the file is gone."""


_SCRIPTS = HistoryEntry(time=0.0, config=ElasticConfig(version=0))
"""What was in force before the first version: the script's own values, since the config has no key."""


CONFIG_EVENTS = ("config-applied", "config-refused")
"""The kinds of the events by which ranks say what became of a version of the config."""

UNSET = "unset"
"""The detail of such an event with the values in force of keys where no file sets them, by dotted key."""


def unset_values(events: Iterable[tuple[str, Mapping[str, object]]]) -> dict[str, object]:
    """The values in force of keys that no version sets, by dotted key, as the ranks of a job have told them.

    ``events`` are those of ranks, oldest first, each by its kind and details; the newest counts.
    """
    found: dict[str, object] = {}
    for kind, details in events:
        told = details.get(UNSET)
        if kind == "config-applied" and isinstance(told, Mapping):
            found.update(told)
    return found


def refused_in(events: Iterable[tuple[str, Mapping[str, object]]]) -> dict[str, str]:
    """Why the ranks of a job have refused versions, by the digest of their contents.

    ``events`` are those of ranks, oldest first, each by its kind and details. A version that came into force later is
    not refused.
    """
    refused: dict[str, tuple[object, str]] = {}
    for kind, details in events:
        version, digest = details.get("version"), details.get("digest")
        if kind == "config-refused" and isinstance(digest, str) and digest:
            refused[digest] = version, str(details.get("why"))
        elif kind == "config-applied":
            refused = {digest: row for digest, row in refused.items() if row[0] != version}
    return {digest: why for digest, (_, why) in refused.items()}


def _newest_accepted(entries: Sequence[HistoryEntry], refused: Collection[str] = ()) -> HistoryEntry | None:
    """The newest entry whose digest is not ``refused``, from which the next version is made; None without one."""
    return next((entry for entry in reversed(entries) if entry.config.digest not in refused), None)


def undo_target(entries: Sequence[HistoryEntry], refused: Collection[str] = ()) -> HistoryEntry:
    """The entry whose content an undo writes again, among those whose digest is not ``refused``.

    It is the one before the version in which the present content was first written: undos in a row go further and
    further back, and from the first version to one without keys. A version that only asked for a checkpoint is passed
    over, as nothing of it is left to undo. Where the newest entry is refused, it is the newest that is not.
    """
    if entries and entries[-1].config.digest in refused:
        return _newest_accepted(entries, refused) or _SCRIPTS
    kept = [entry for entry in entries if entry.config.digest not in refused]
    for index in range(len(kept) - 1, 0, -1):
        before, first = kept[index - 1], kept[index]
        if first.restores is None and first.config.version == kept[-1].origin:
            if not (first.config.checkpoint.now and _lasting(first) == _lasting(before)):
                return before
            kept = kept[:index]
    is_first = bool(kept) and kept[0].restores is None and kept[0].config.version == kept[-1].origin
    if is_first and kept[-1].config.values() and len(entries) < _MOST_ENTRIES:  # a longer one has lost its first
        return _SCRIPTS
    raise _refused("there is no earlier version to go back to", "a file that sets a key, or whose history has")


def _lasting(entry: HistoryEntry) -> dict[str, Any]:
    """The values of an entry but ``checkpoint.now``, which is for that version alone."""
    return {path: value for path, value in entry.config.values().items() if path != "checkpoint.now"}


def next_config(entries: Sequence[HistoryEntry], edit: ConfigEdit, *, version: int) -> ElasticConfig:
    """The config that ``edit`` makes of the newest of ``entries`` that is not refused, as ``version``.

    ConfigError where the edit, or what comes of it, is refused.
    """
    base = _newest_accepted(entries, edit.refused)
    values: dict[str, Any] = {} if base is None else dict(base.config.values())
    values.pop("checkpoint.now", None)  # it was for the version that introduced it
    for path in edit.remove:
        if path not in values:
            raise _refused(f"{path} is not in the file", f"one of {', '.join(values) or 'no key at all'}")
        del values[path]
    values.update(edit.changes)
    new = ElasticConfig.from_values(values, version=version, reason=edit.reason)
    return _of_allowed_size(replace(new, apply_at_step=edit.at_step))


def restored(target: HistoryEntry, *, version: int) -> ElasticConfig:
    """The content of ``target`` as another version; ConfigError where its file would be too large."""
    is_first = target.origin == _SCRIPTS.origin
    new = replace(
        target.config,
        version=version,
        reason="back to before the first version: no key is set" if is_first else f"back to version {target.origin}",
        apply_at_step=None,
        checkpoint=replace(target.config.checkpoint, now=None),  # it was for the version that introduced it
    )
    return _of_allowed_size(new)


def next_version(entries: Sequence[HistoryEntry], above: int = 0) -> int:
    """The version that comes after all of these, and after ``above``."""
    return max([above, *(entry.config.version for entry in entries)]) + 1


class ConfigHistory:
    """The config file at ``path`` with its earlier versions. One writer at a time, among processes of one machine.

    A writer waits for another one, by default as long as that takes. With ``patience_seconds`` a method that writes
    raises TimeoutError once it has waited so long; it has written nothing then.
    """

    def __init__(self, path: Path, *, patience_seconds: float | None = None) -> None:
        self.path = path
        self._patience_seconds = patience_seconds
        self._history = path.with_name(f".{path.name}.history")
        self._lock = path.with_name(f".{path.name}.lock")

    def current(self) -> ElasticConfig | None:
        """The config that the file holds; None where there is no file, ConfigError if it is refused."""
        try:
            return ElasticConfig.parse(read_at_most(self.path, MAX_BYTES))
        except FileNotFoundError:
            return None

    def entries(self) -> list[HistoryEntry]:
        """All versions of the config file so far, oldest first, with its present one."""
        return self._with_current(self._read(), self.current())

    def set(self, edit: ConfigEdit) -> ElasticConfig:
        """Write the next version, as ``next_config``; ConfigError, and no write, if it is no config.

        Where there is no file the edit starts from a config without keys, whatever the history has.
        """
        with self._alone() as recorded:
            current = self.current()
            entries = self._with_current(recorded, current)
            new = next_config([] if current is None else entries, edit, version=next_version(entries, edit.above))
            return self._write(new, entries)

    def undo(self, refused: Collection[str] = (), *, above: int = 0) -> ElasticConfig:
        """Write the content before the present one as a new version; where the file is invalid or lost, its last one.

        Versions that the job's ranks refused are passed over: ``refused`` has their digests. The new version is above
        ``above``, that of the config in force.
        """
        with self._alone() as recorded:
            try:
                current = self.current()
            except ConfigError:
                if not recorded:
                    raise
                current = None
            entries = self._with_current(recorded, current)
            is_lost = current is None and recorded
            target = _newest_accepted(recorded, refused) or _SCRIPTS if is_lost else undo_target(entries, refused)
            return self._write(restored(target, version=next_version(entries, above)), entries, restores=target.origin)

    def put(self, new: ElasticConfig) -> bool:
        """Write a version that was made elsewhere, unchanged; False, and no write, if the file's version is as high."""
        with self._alone() as recorded:
            try:
                current = self.current()
            except ConfigError:  # it is replaced
                current = None
            if current is not None and current.version >= new.version:
                return False
            self._write(_of_allowed_size(new), self._with_current(recorded, current))
            return True

    def take_in(self) -> None:
        """Enter the config that the file holds now in the history, where it is not the newest version there."""
        with self._alone() as recorded:
            entries = self._with_current(recorded, self.current())
            if len(entries) > len(recorded):
                self._write_history(entries)

    def clear(self) -> None:
        """Remove the file and its history: what is written next is version 1."""
        with self._alone():
            self.path.unlink(missing_ok=True)
            self._history.unlink(missing_ok=True)

    @contextmanager
    def _alone(self) -> Iterator[list[HistoryEntry]]:
        """A context in which no other process writes; gives the entries of the history file."""
        make_folder(self.path.parent)
        with exclusive(self._lock) if self._patience_seconds is None else self._locked(self._patience_seconds):
            yield self._read()

    @contextmanager
    def _locked(self, patience_seconds: float) -> Iterator[None]:
        deadline = time.monotonic() + patience_seconds
        while (lock := try_lock(self._lock)) is None:
            if time.monotonic() >= deadline:
                words = "another process writes the config file, and has not ended so far; try again later"
                raise TimeoutError(errno.ETIMEDOUT, words, str(self.path))
            time.sleep(_POLL_SECONDS)
        try:
            yield
        finally:
            os.close(lock)

    def _read(self) -> list[HistoryEntry]:
        try:
            lines = read_at_most(self._history, _MOST_BYTES).decode(errors="replace").splitlines()
        except FileNotFoundError:
            return []
        entries = []
        for line in lines:
            try:
                entries.append(HistoryEntry.from_json(line))
            except ValueError:  # a ConfigError too: a damaged line loses its own version only
                continue
        return entries

    def _with_current(self, entries: list[HistoryEntry], current: ElasticConfig | None) -> list[HistoryEntry]:
        if current is None or (entries and entries[-1].config.digest == current.digest):
            return entries
        return [*entries, HistoryEntry(time=time.time(), config=current)]

    def _write(self, new: ElasticConfig, entries: list[HistoryEntry], restores: int | None = None) -> ElasticConfig:
        """Write a version to the config file, then to the history.

        The config file comes first: a history that lacks its newest version takes it in at the next call.
        """
        write_whole(self.path, new.to_json().encode())
        try:
            self._write_history([*entries, HistoryEntry(time=time.time(), config=new, restores=restores)])
        except OSError as error:
            _logger.warning(
                "version %d was written to the config file, but not to its history %s: %s",
                new.version,
                self._history,
                error,
            )
        return new

    def _write_history(self, entries: Sequence[HistoryEntry]) -> None:
        write_whole(self._history, "".join(entry.to_json() + "\n" for entry in entries[-_MOST_ENTRIES:]).encode())


def _of_allowed_size(new: ElasticConfig) -> ElasticConfig:
    """``new``; ConfigError where its file would be too large, which values that are allowed one by one can make it."""
    ElasticConfig.parse(new.to_json().encode())
    return new


def _refused(given: str, allowed: str) -> ConfigError:
    return ConfigError([Refusal(key="", given=given, allowed=allowed)])
