"""What `elastic-ext config` does, with a config file or with what a master has."""

from __future__ import annotations

import argparse
import functools
import json
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Protocol

from elastic_ext.agent.config_writer import AgentsConfig, living_agent_of
from elastic_ext.agent.event_files import EventFiles
from elastic_ext.agent.status.files import read_run_directory
from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.config.history import CONFIG_EVENTS, ConfigEdit, ConfigHistory, HistoryEntry, refused_in, unset_values
from elastic_ext.errors import ConfigError, Refusal
from elastic_ext.records.json import read_value, shown
from elastic_ext.records.metrics import JobEvent, RankMetrics
from elastic_ext.records.text import counted, expanded, on_one_line

from .jobs import config_file_in, one_job

__all__ = ["COMMANDS", "ConfigPlace", "FilesConfig", "JobAnswer", "RefusedByJob", "parse_assignment", "remark_beside"]

_ALLOWED = (
    "--file FILE, --job NAME or --master ADDR, or ELASTIC_EXT_CONFIG_FILE, ELASTIC_EXT_RUN_DIR or "
    "ELASTIC_EXT_MASTER set"
)
_MOST_EVENT_BYTES = 1 << 20
_MOST_REFUSED = 200  # as many versions as a history has
_JUDGED_SECONDS = 5.0
_LOOK_SECONDS = 0.05
_UNREAD = "nothing in this job has asked for {} so far; correct the name if it is misspelt\n"
_NOT_THE_FILES = "the script has it too, or the checkpoint that was resumed"


class ConfigPlace(Protocol):
    """A place with a config and all of its versions: a file, or a master.

    ``refused`` gives why the ranks of the job have refused versions, by digest, and ``judged``, after a write, what
    they make of the new one; None where that is not waited for. ``unset`` gives the values in force of keys that no
    version sets, as far as ranks have told them. ``beside`` says what else the running job has in force, in words: a
    revision of the version, or a version without a file; empty where nothing, or nobody tells. ``taken`` gives how many
    nodes have a version, and how many there are, and ``step`` how many steps training has taken; None where nobody
    tells.
    """

    name: str
    """The file or the master, in words."""

    def current(self) -> ElasticConfig | None: ...
    def entries(self) -> list[HistoryEntry]: ...
    def json_lines(self) -> list[str]: ...
    def set(self, edit: ConfigEdit) -> ElasticConfig: ...
    def undo(self) -> ElasticConfig: ...
    def refused(self) -> Mapping[str, str]: ...
    def unset(self) -> Mapping[str, object]: ...
    def judged(self, new: ElasticConfig) -> JobAnswer | None: ...
    def beside(self, current: ElasticConfig | None) -> str: ...
    def taken(self, version: int) -> tuple[int, int] | None: ...
    def step(self) -> int | None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class JobAnswer:
    """What a running job has made of a version that was written."""

    outcome: Literal["in force", "refused", "pending"]
    words: str
    step: int | None = None
    """The first step under the version; None where it is not in force."""
    replaces: object = None
    """The version that was in force before; None where that is not known."""
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """By dotted key that has another value in force now, the value before and after; None for what is not known."""
    effects: Mapping[str, str] = field(default_factory=dict)
    """By dotted key, what its new value leads to, in words, where the value alone does not tell."""
    unread: tuple[str, ...] = ()
    """The dotted keys of the version that nothing in the job has asked for."""


class RefusedByJob(Exception):
    """A version was written that the running job has refused; ``output`` is what there is to print of the write."""

    def __init__(self, output: str, words: str) -> None:
        self.output = output
        super().__init__(words)


class FilesConfig:
    """A config file, written by the agent that has it, where one runs; and what its job's ranks say of versions."""

    def __init__(self, path: Path, run_dirs: Sequence[Path], *, is_forced: bool) -> None:
        """``run_dirs`` are where the agent that has the file may have its record, and ranks theirs."""
        self._run_dirs = run_dirs
        self._is_forced = is_forced
        self._history = ConfigHistory(path)
        self.name = str(self._history.path)
        self._told: list[tuple[str, Mapping[str, object]]] = []  # the events about versions so far

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

    def set(self, edit: ConfigEdit) -> ElasticConfig:
        return self._writer().set(
            replace(edit, refused=tuple(self.refused())[-_MOST_REFUSED:], above=self._version_in_force())
        )

    def undo(self) -> ElasticConfig:
        return self._writer().undo(list(self.refused())[-_MOST_REFUSED:], above=self._version_in_force())

    def _version_in_force(self) -> int:
        newest = self._newest_metrics()
        return 0 if newest is None else newest.config_version

    def refused(self) -> Mapping[str, str]:
        """Why the job's ranks have refused versions, by the digest of their contents, as their events say it."""
        self._look()
        return refused_in(self._told)

    def unset(self) -> Mapping[str, object]:
        """The values in force of keys that no version sets, as far as the job's ranks have told them."""
        self._look()
        return unset_values(self._told)

    def judged(self, new: ElasticConfig) -> JobAnswer | None:
        """Wait a few seconds for the running job to take ``new`` or to refuse it; None where none follows the file.

        Nor is one waited for that is to take it at a step to come.
        """
        newest = self._newest_metrics()
        if newest is None or new.apply_at_step is not None:
            return None
        deadline = time.monotonic() + _JUDGED_SECONDS
        while True:
            for event in self._look():
                version = event.details.get("version")
                if event.kind == "config-applied" and isinstance(version, int) and version > new.version:
                    return self._overtaken(new, version, event.step)
                if version != new.version:
                    continue
                if event.kind == "config-applied":
                    on_all = f" on all {newest.world_size} ranks" if newest.world_size > 1 else ""
                    words = f"in force from step {event.step}{on_all}"
                    return _answer(event, words)
                words = f"the job refuses version {new.version}, and version {newest.config_version} stays in force"
                return JobAnswer(outcome="refused", words=f"{words}: {event.details.get('why')}")
            if time.monotonic() >= deadline:
                words = f"not in force after {_JUDGED_SECONDS:g} seconds: ranks take it between two steps"
                return JobAnswer(outcome="pending", words=f"{words}; `elastic-ext status` says when it is")
            threading.Event().wait(_LOOK_SECONDS)

    def _overtaken(self, new: ElasticConfig, version: int, step: int) -> JobAnswer:
        """What became of ``new``, which the job never took: a later version came into force at ``step``."""
        config = next((each.config for each in self.entries() if each.config.version == version), None)
        later = {} if config is None else config.values()
        lost = [f"{key}={later.get(key, 'unset')}" for key, value in new.values().items() if later.get(key) != value]
        has = f"has {', '.join(lost)} instead" if lost else "has the same values"
        why = f" ({config.reason})" if config is not None and config.reason else ""
        words = f"version {version}{why} came after it, {has}, and is in force from step {step}"
        return JobAnswer(outcome="pending" if lost else "in force", words=words, step=None if lost else step)

    def beside(self, current: ElasticConfig | None) -> str:
        """What is in force in the running job beside ``current``, in words; empty where nothing is.

        That is a revision of ``current``, or, where there is no file, a version that the job has from elsewhere.
        """
        newest = self._newest_metrics()
        if current is None and newest is not None and newest.config_version > 0:
            return (
                f"the running job has version {newest.config_version} in force, of the checkpoint that it has resumed, "
                "or of a file that is gone"
            )
        is_revised = newest is not None and newest.config_revision > 0
        if newest is None or current is None or not is_revised or newest.config_version != current.version:
            return ""
        self._look()
        details = [each for kind, each in self._told if kind == "config-applied" and each.get("revision")]
        changed: dict[str, object] = {}
        for each in details:
            changes = each.get("changes")
            if each.get("version") == current.version and isinstance(changes, Mapping):
                changed |= {path: pair[1] for path, pair in changes.items() if isinstance(pair, list) and pair[1:]}
        values = current.values()
        others = [f"{path}={_value(value)}" for path, value in changed.items() if value != values.get(path)]
        return (
            f"the running job has version {current.version}, revision {newest.config_revision} in force, a change that "
            f"it made itself{': ' if others else ''}{', '.join(others)}; the next version replaces it"
        )

    def taken(self, version: int) -> tuple[int, int] | None:
        """None: of a config file nobody tells which nodes have taken a version."""
        return None

    def step(self) -> int | None:
        """How many steps the running job has taken; None where none follows the file."""
        newest = self._newest_metrics()
        return None if newest is None else newest.step

    def _newest_metrics(self) -> RankMetrics | None:
        """What a living rank of the job has written last of itself; None where none follows the file."""
        now, host = time.time(), socket.gethostname()
        found = [read_run_directory(each, now=now, host=host) for each in self._event_files]
        ranks = [each for files in found for each in files.metrics if each.pid in files.living]
        return max(ranks, key=lambda each: each.time, default=None)

    def _look(self) -> list[JobEvent]:
        """The events about versions of the config since the last look."""
        found = [event for file in self._event_files.values() for event in file.look().events]
        new = sorted((event for event in found if event.kind in CONFIG_EVENTS), key=lambda event: event.time)
        self._told += [(event.kind, event.details) for event in new]
        return new

    @functools.cached_property
    def _event_files(self) -> dict[Path, EventFiles]:
        """The event files of the run directories whose job follows this config file."""
        path = os.path.realpath(self._history.path)
        folders = [each for each in dict.fromkeys([self._history.path.parent, *self._run_dirs]) if each.is_dir()]
        return {
            each: EventFiles(each, most_bytes=_MOST_EVENT_BYTES, of_agent=False)
            for each in folders
            if os.path.realpath(config_file_in(each)) == path
        }

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
    refused = place.refused()
    edit = ConfigEdit(
        {path: value for path, value in pairs.items() if value is not None},
        remove=tuple(path for path, value in pairs.items() if value is None),
        reason=options.reason,
        at_step=options.at_step,
    )
    return _written(place, place.set(edit), options, refused)


def _undo(place: ConfigPlace, options: argparse.Namespace) -> str:
    return _written(place, place.undo(), options, {})


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
    return _changes(first, second, place.unset())


def _history(place: ConfigPlace, options: argparse.Namespace) -> str:
    if options.json:
        return "".join(f"{line}\n" for line in place.json_lines())
    lines = []
    previous, unset = ElasticConfig(version=0), place.unset()
    for entry in place.entries():
        when = datetime.fromtimestamp(entry.time).strftime("%Y-%m-%d %H:%M:%S")
        reason = f": {on_one_line(entry.config.reason)}" if entry.config.reason else ""
        lines.append(f"version {entry.config.version}, {when}{reason}\n")
        lines += [f"  {line}\n" for line in _changes(previous, entry.config, unset).splitlines()]
        previous = entry.config
    return "".join(lines)


COMMANDS = {"show": _show, "set": _set, "diff": _diff, "history": _history, "undo": _undo}
"""The commands of ``elastic-ext config``, by name; each gives the text to be printed."""


def remark_beside(place: ConfigPlace, options: argparse.Namespace) -> str:
    """What `config show` says beside the config that it has printed; empty where there is nothing to say."""
    current = place.current() if options.command == "show" else None
    return "" if current is None else place.beside(current)


_WRITING = ("set", "undo")


def _written(
    place: ConfigPlace, new: ElasticConfig, options: argparse.Namespace, passed_over: Mapping[str, str]
) -> str:
    """What was written, and what the running job makes of it; and where, if the command line does not name that.

    ``passed_over`` are the digests of versions from which ``new`` was not made, with the reasons. RefusedByJob where
    the job refuses what was written.
    """
    earlier = [entry for entry in place.entries() if entry.config.version < new.version]
    accepted = [entry.config for entry in earlier if entry.config.digest not in passed_over]
    before = accepted[-1] if accepted else ElasticConfig(version=0)
    early = (_brought_forward if options.command == "set" else _brought_back_early)(place, accepted, new)
    taken, verdict = place.taken(new.version), place.judged(new)
    record: dict[str, Any] = {"version": new.version, "place": place.name, "changes": _changes_record(before, new)}
    is_named = any((options.file, options.job, options.master))
    words = f"version {new.version} written{'' if is_named else f' to {place.name}'}\n"
    if earlier and earlier[-1].config is not before:
        refused = earlier[-1].config
        why = on_one_line(passed_over[refused.digest])
        words += f"made from version {before.version}, since the job has refused version {refused.version}: {why}\n"
        record["made_from"] = before.version
    words += _changes_in_words(before, new, verdict)
    if early:
        words += f"{early}\n"
        record["early"] = early
    if taken is not None:
        record |= {"num_holding": taken[0], "num_nodes": taken[1]}
        words += f"taken by {taken[0]} of {counted(taken[1], 'node')}\n"
    if verdict is not None:
        record |= {"outcome": verdict.outcome, "step": verdict.step, "words": verdict.words}
        record |= {"in_force": verdict.changes, "effects": verdict.effects, "unread": verdict.unread}
        words += "" if verdict.outcome == "refused" else f"{verdict.words}\n"
        words += _UNREAD.format(", ".join(verdict.unread)) if verdict.unread else ""
    output = _line(record) if options.json else words
    if verdict is not None and verdict.outcome == "refused":
        raise RefusedByJob(output, f"{verdict.words}; `elastic-ext config undo` puts back what is in force")
    return output


def _brought_forward(place: ConfigPlace, accepted: Sequence[ElasticConfig], new: ElasticConfig) -> str:
    """What ``new`` brings into force before its time, in a sentence: keys that an earlier version set for a later step.

    ``accepted`` are the versions before ``new`` that the job has not refused. Empty where there are no such keys.
    """
    base = accepted[-1] if accepted else new
    begins = base.apply_at_step
    if begins is None or (new.apply_at_step or 0) >= begins:
        return ""
    step = place.step()
    reached = 0 if step is None else step
    begun = [each for each in accepted if (each.apply_at_step or 0) <= reached]
    before = begun[-1] if begun else ElasticConfig(version=0)
    keys = [path for path in before.differences(base) if path not in base.differences(new)]
    if not keys:
        return ""
    unless = ", unless that step has passed" if step is None else ""
    return (
        f"version {new.version} holds what version {base.version} set for step {begins} as well ({', '.join(keys)}): "
        f"it comes into force with this version{unless}; --at-step {begins} would keep it waiting"
    )


def _brought_back_early(place: ConfigPlace, accepted: Sequence[ElasticConfig], new: ElasticConfig) -> str:
    """What the undo ``new`` brings into force before its time, in a sentence: keys that waited for a later step.

    ``accepted`` are the versions before ``new`` that the job has not refused. Empty where there are no such keys.
    """
    restores = next((each.restores for each in place.entries() if each.config.version == new.version), None)
    target = next((each for each in accepted if each.version == restores), None)
    if target is None or target.apply_at_step is None:
        return ""
    step = place.step()
    reached = 0 if step is None else step
    if target.apply_at_step <= reached:
        return ""
    begun = [ElasticConfig(version=0), *(each for each in accepted if (each.apply_at_step or 0) <= reached)]
    before = [each for each in begun if each.version < target.version][-1]
    waiting, changed = before.differences(target), begun[-1].differences(new)
    keys = [path for path in waiting if path in changed]
    if not keys:
        return ""
    unless = ", unless that step has passed" if step is None else ""
    return (
        f"version {new.version} holds what version {target.version} set for step {target.apply_at_step} "
        f"({', '.join(keys)}): it comes into force with this version{unless}; set it again with --at-step "
        f"{target.apply_at_step} to have it wait"
    )


def _existing(place: ConfigPlace) -> ElasticConfig:
    current = place.current()
    if current is None:
        others = place.beside(None)
        given = f"{place.name} does not exist{', and ' if others else ''}{others}"
        raise _refused(
            given,
            f"a config; `config set` writes one{', with the next version above the one in force' if others else ''}",
        )
    return current


def _version(entries: Sequence[HistoryEntry], version: int) -> ElasticConfig:
    found = [entry.config for entry in entries if entry.config.version == version]
    if not found:
        known = ", ".join(str(entry.config.version) for entry in entries)
        raise _refused(f"version {version} is not in the history", f"one of {known}")
    return found[-1]


def _changes(old: ElasticConfig, new: ElasticConfig, unset: Mapping[str, object]) -> str:
    """What two versions differ in, a line for each key; ``unset`` has values of keys that a version does not set."""

    def words(path: str, value: object) -> str:
        then = f" (then {shown(unset[path], 200)} is in force)" if value is None and path in unset else ""
        return _value(value) + then

    lines = (f"{path}: {words(path, old)} -> {words(path, new)}\n" for path, (old, new) in old.differences(new).items())
    return "".join(lines)


def _answer(event: JobEvent, words: str) -> JobAnswer:
    """A job's answer in the event by which a rank tells that a version came into force.

    The event comes from a file, to which a job of another version of this library may have written.
    """
    changes, effects, unread = (event.details.get(name) for name in ("changes", "effects", "unread"))
    pairs = changes.items() if isinstance(changes, Mapping) else ()
    return JobAnswer(
        outcome="in force",
        words=words,
        step=event.step,
        replaces=event.details.get("replaces"),
        changes={
            path: (each[0], each[1]) for path, each in pairs if isinstance(each, (list, tuple)) and len(each) == 2
        },
        effects={path: str(text) for path, text in effects.items()} if isinstance(effects, Mapping) else {},
        unread=tuple(map(str, unread)) if isinstance(unread, (list, tuple)) else (),
    )


def _changes_in_words(old: ElasticConfig, new: ElasticConfig, answer: JobAnswer | None) -> str:
    """What a version changes in the file, a line for each key, with what the job's ``answer`` says of the key.

    A key that the file did not have has the value before that was in force, where the job knows it.
    """
    lines = []
    for path, (before, after) in old.differences(new).items():
        used, remarks = (None, None), []
        if answer is not None and answer.outcome == "in force":
            used = answer.changes.get(path, used)
            if after is None and path in answer.changes and used[1] is not None:
                remarks.append(f"{_value(used[1])} is in force")
            elif after is None and path not in answer.changes and answer.replaces == old.version:
                remarks.append(f"{_value(before)} stays in force: {_NOT_THE_FILES}")
            if path in answer.effects:
                remarks.append(on_one_line(answer.effects[path]))
        remark = f" ({'; '.join(remarks)})" if remarks else ""
        lines.append(f"{path}: {_value(used[0] if before is None else before)} -> {_value(after)}{remark}\n")
    return "".join(lines)


def _changes_record(old: ElasticConfig, new: ElasticConfig) -> dict[str, Any]:
    return {path: {"before": before, "after": after} for path, (before, after) in old.differences(new).items()}


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record) + "\n"


def _value(value: object) -> str:
    return "not set" if value is None else shown(value, 200)


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
