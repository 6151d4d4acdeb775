"""What `elastic-ext config` does, with a config file or with what a master has."""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from elastic_ext.agent.config_writer import AgentsConfig, living_agent_of
from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.config.history import ConfigHistory, HistoryEntry
from elastic_ext.errors import ConfigError, Refusal
from elastic_ext.records.json import read_value, shown
from elastic_ext.records.text import counted, expanded, on_one_line

from .jobs import config_file_in, one_job

__all__ = ["COMMANDS", "ConfigPlace", "FilesConfig", "parse_assignment"]

_ALLOWED = (
    "--file FILE, --job NAME or --master ADDR, or ELASTIC_EXT_CONFIG_FILE, ELASTIC_EXT_RUN_DIR or "
    "ELASTIC_EXT_MASTER set"
)


class ConfigPlace(Protocol):
    """A place with a config and all of its versions: a file, or a master.

    ``taken`` gives how many nodes have a version, and how many there are; None where nobody tells.
    """

    name: str
    """The file or the master, in words."""

    def current(self) -> ElasticConfig | None: ...
    def entries(self) -> list[HistoryEntry]: ...
    def json_lines(self) -> list[str]: ...
    def set(
        self, changes: Mapping[str, object], *, remove: Sequence[str] = (), reason: str, at_step: int | None = None
    ) -> ElasticConfig: ...
    def undo(self) -> ElasticConfig: ...
    def taken(self, version: int) -> tuple[int, int] | None: ...


class FilesConfig:
    """A config file, written by the agent that has it, where one runs."""

    def __init__(self, path: Path, run_dirs: Sequence[Path], *, is_forced: bool) -> None:
        """``run_dirs`` are where the agent that has the file may have its record."""
        self._run_dirs = run_dirs
        self._is_forced = is_forced
        self._history = ConfigHistory(path)
        self.name = str(self._history.path)

    @classmethod
    def named(cls, options: argparse.Namespace, environ: Mapping[str, str]) -> FilesConfig:
        """The config file that the arguments or the environment name, or else that of the job that is found.

        ConfigError where none is named and no job is found, or several may be meant.
        """
        path, run_dirs = _place(options.file, options.job, environ, writes=options.command in _WRITING)
        return cls(path, run_dirs, is_forced=getattr(options, "force", False))

    def current(self) -> ElasticConfig | None:
        return self._history.current()

    def entries(self) -> list[HistoryEntry]:
        return self._history.entries()

    def json_lines(self) -> list[str]:
        return [entry.to_json() for entry in self._history.entries()]

    def set(
        self, changes: Mapping[str, object], *, remove: Sequence[str] = (), reason: str, at_step: int | None = None
    ) -> ElasticConfig:
        return self._writer().set(changes, remove=remove, reason=reason, at_step=at_step)

    def undo(self) -> ElasticConfig:
        return self._writer().undo()

    def taken(self, version: int) -> tuple[int, int] | None:
        """None: of a config file nobody tells which nodes have taken a version."""
        return None

    def _writer(self) -> ConfigHistory | AgentsConfig:
        if self._is_forced:
            return self._history
        folders = [self._history.path.parent, *self._run_dirs]
        agent = living_agent_of(self._history.path, folders, host=socket.gethostname())
        return self._history if agent is None else AgentsConfig(agent)


def parse_assignment(text: str) -> tuple[str, object]:
    """``KEY=VALUE`` as key and value: JSON where it is JSON, else text; None where the value is empty.

    ConfigError if it is neither, or JSON that a config cannot hold.
    """
    path, equals, value = text.partition("=")
    if not equals or not path:
        raise _refused(shown(text), "KEY=VALUE, such as optimizer.learning_rate=0.001")
    if value == "":
        return path, None
    try:
        return path, read_value(value)
    except json.JSONDecodeError:
        return path, value


def _show(place: ConfigPlace, options: argparse.Namespace) -> str:
    return _existing(place).to_json()


def _set(place: ConfigPlace, options: argparse.Namespace) -> str:
    pairs = dict(parse_assignment(text) for text in options.assignments)
    for path, value in pairs.items():
        if value is None and f"{path}=" not in options.assignments:
            raise _refused(f"{path} is null", f"a value, or {path}= to take the key out")
    new = place.set(
        {path: value for path, value in pairs.items() if value is not None},
        remove=[path for path, value in pairs.items() if value is None],
        reason=options.reason,
        at_step=options.at_step,
    )
    return _written(place, new, options)


def _undo(place: ConfigPlace, options: argparse.Namespace) -> str:
    return _written(place, place.undo(), options)


def _diff(place: ConfigPlace, options: argparse.Namespace) -> str:
    _existing(place)
    entries = place.entries()
    if len(options.versions) > 2:
        raise _refused(f"{len(options.versions)} versions are given", "at most two: from, and to")
    given = [_version(entries, version) for version in options.versions]
    first = given[0] if given else entries[-2 if len(entries) > 1 else -1].config
    second = given[1] if len(given) > 1 else entries[-1].config
    if options.json:
        return _line({"from": first.version, "to": second.version, "changes": _changes_record(first, second)})
    return _changes(first, second)


def _history(place: ConfigPlace, options: argparse.Namespace) -> str:
    if options.json:
        return "".join(f"{line}\n" for line in place.json_lines())
    lines = []
    previous = ElasticConfig(version=0)
    for entry in place.entries():
        when = datetime.fromtimestamp(entry.time).strftime("%Y-%m-%d %H:%M:%S")
        reason = f": {on_one_line(entry.config.reason)}" if entry.config.reason else ""
        lines.append(f"version {entry.config.version}, {when}{reason}\n")
        lines += [f"  {line}\n" for line in _changes(previous, entry.config).splitlines()]
        previous = entry.config
    return "".join(lines)


COMMANDS = {"show": _show, "set": _set, "diff": _diff, "history": _history, "undo": _undo}
"""The commands of ``elastic-ext config``, by name; each gives the text to be printed."""
_WRITING = ("set", "undo")


def _written(place: ConfigPlace, new: ElasticConfig, options: argparse.Namespace) -> str:
    """What was written; and where, if the command line does not name that."""
    earlier = [entry.config for entry in place.entries() if entry.config.version < new.version]
    before = earlier[-1] if earlier else ElasticConfig(version=0)
    taken = place.taken(new.version)
    if options.json:
        record: dict[str, Any] = {"version": new.version, "place": place.name, "changes": _changes_record(before, new)}
        if taken is not None:
            record |= {"num_holding": taken[0], "num_nodes": taken[1]}
        return _line(record)
    is_named = any((options.file, options.job, options.master))
    words = f"version {new.version} written{'' if is_named else f' to {place.name}'}\n{_changes(before, new)}"
    if taken is not None:
        words += f"taken by {taken[0]} of {counted(taken[1], 'node')}\n"
    return words


def _existing(place: ConfigPlace) -> ElasticConfig:
    current = place.current()
    if current is None:
        raise _refused(f"{place.name} does not exist", "a config; `config set` makes one")
    return current


def _version(entries: Sequence[HistoryEntry], version: int) -> ElasticConfig:
    found = [entry.config for entry in entries if entry.config.version == version]
    if not found:
        known = ", ".join(str(entry.config.version) for entry in entries)
        raise _refused(f"version {version} is not in the history", f"one of {known}")
    return found[-1]


def _changes(old: ElasticConfig, new: ElasticConfig) -> str:
    lines = (f"{path}: {_value(before)} -> {_value(after)}\n" for path, (before, after) in old.differences(new).items())
    return "".join(lines)


def _changes_record(old: ElasticConfig, new: ElasticConfig) -> dict[str, Any]:
    return {path: {"before": before, "after": after} for path, (before, after) in old.differences(new).items()}


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record) + "\n"


def _value(value: object) -> str:
    return "absent" if value is None else shown(value, 200)


def _place(
    file: Path | None, job: str | None, environ: Mapping[str, str], *, writes: bool
) -> tuple[Path, Sequence[Path]]:
    """The config file that is meant, and the run directories of its job, as far as they are known."""
    own = [_path_in(environ, "ELASTIC_EXT_RUN_DIR")] if environ.get("ELASTIC_EXT_RUN_DIR") else []
    if file is not None:
        return (config_file_in(file), [file]) if file.is_dir() else (file, own)
    if job is None and environ.get("ELASTIC_EXT_CONFIG_FILE"):
        return _path_in(environ, "ELASTIC_EXT_CONFIG_FILE"), own
    if job is None and own:
        return config_file_in(own[0]), own
    try:
        run_dirs = one_job(None, job, environ, ways="--job NAME", writes=writes).newest_first()
    except ValueError as error:
        raise _refused(str(error) if job is not None else f"no config file is named, and {error}", _ALLOWED) from None
    return config_file_in(run_dirs[0]), run_dirs


def _path_in(environ: Mapping[str, str], name: str) -> Path:
    try:
        return expanded(environ[name])
    except ValueError:
        raise _refused(f"{name} is {shown(environ[name])}", "a path, with ~ for a home folder that exists") from None


def _refused(given: str, allowed: str) -> ConfigError:
    return ConfigError([Refusal(key="", given=given, allowed=allowed)])
