"""The checkpoints of a job: which there are, which count, which is newest, and which a retention rule keeps."""

from __future__ import annotations

import itertools
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from elastic_ext.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound
from elastic_ext.records.files import look_afresh

from .commit import Commit, Lineage, place_in, read_checked, read_commit, read_in_pieces

__all__ = [
    "ListedCheckpoint",
    "Listing",
    "Retention",
    "RetentionVerdict",
    "abandoned_for_nothing",
    "check_name",
    "is_name",
    "is_set_aside",
    "judge",
    "leading_to",
    "left_for",
    "newest_of",
    "oldest_first",
]


# --- the checkpoints of a job, as its folder tells of them, which of them count, and which is newest -----------------

_Summary = TypeVar("_Summary")
_NAME = re.compile(r"(?:step|epoch)_[0-9]{1,18}")
_ABANDONED = re.compile(_NAME.pattern + r"\.abandoned-((.+?)(?:-[0-9]+)?)")
_ASIDE = re.compile(rf"{_NAME.pattern}\.(?:abandoned-[0-9A-Za-z_-]+|unreadable(?:-[0-9]+)?)")


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedCheckpoint:
    """A committed checkpoint in a job's folder."""

    path: Path
    commit: Commit

    @classmethod
    def read(cls, path: Path) -> ListedCheckpoint:
        """The checkpoint in the folder ``path``; raises what ``read_commit`` raises."""
        return cls(path=path, commit=read_commit(path))

    @classmethod
    def read_afresh(cls, path: Path) -> ListedCheckpoint:
        """The checkpoint in ``path`` that another machine may just have made, past this one's cache of the folder."""
        try:
            return cls.read(path)
        except CheckpointNotFound:
            for folder in (path.parent, path):
                look_afresh(folder)
            return cls.read(path)

    @property
    def name(self) -> str:
        return self.path.name

    def read_meta(self, file: str) -> bytes:
        """The contents of a file of tensors' metadata, checked; CheckpointDamaged where COMMIT does not name it."""
        return read_checked(self.path / file, self._named(self.commit.metas, file))

    def read_state(self, file: str) -> bytes:
        """The contents of a file of plain values, checked; CheckpointDamaged where COMMIT does not name it."""
        return read_checked(self.path / file, self._named(self.commit.states, file).checksum)

    def state_pieces(self, file: str) -> Iterator[bytes]:
        """The contents of a file of plain values, piece by piece; none comes before all are checked."""
        return read_in_pieces(self.path / file, self._named(self.commit.states, file).checksum)

    def _named(self, summaries: Mapping[str, _Summary], file: str) -> _Summary:
        if file not in summaries:
            raise CheckpointDamaged(f"{self.path}: COMMIT does not name {file}")
        return summaries[file]


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """What lies in a job's folder under names of checkpoints: committed, unreadable or uncommitted."""

    found: tuple[ListedCheckpoint, ...]
    """The committed checkpoints, oldest first."""
    unreadable: Mapping[str, CheckpointError | OSError]
    """The names of checkpoints whose COMMIT is there and cannot be read or trusted, each with the reason."""
    unfinished: tuple[str, ...]
    """The names of folders that were never committed: saves under way, and what is left of killed ones."""

    @classmethod
    def read(cls, folder: Path, *, aside: bool = False) -> Listing:
        """What lies in ``folder`` now, or what was set ``aside`` there; OSError if not even that can be told."""
        found, unfinished = [], []
        unreadable: dict[str, CheckpointError | OSError] = {}
        for name in sorted(os.listdir(folder)):
            path = folder / name
            if not (is_set_aside if aside else is_name)(name) or _is_another_name(path):
                continue
            try:
                found.append(ListedCheckpoint.read(path))
            except CheckpointNotFound:
                if _is_folder(path):
                    unfinished.append(name)
            except (CheckpointError, OSError) as error:
                unreadable[name] = error
        return cls(found=tuple(oldest_first(found)), unreadable=unreadable, unfinished=tuple(unfinished))

    @classmethod
    def counting(cls, folder: Path) -> Listing:
        """What a job may go on from in ``folder``: what has a checkpoint's name, and what was abandoned for nothing.

        Where none of that can be read, abandoned ones that might count and cannot be read are ``unreadable`` too.
        """
        named, aside = cls.read(folder), cls.read(folder, aside=True)
        revived = abandoned_for_nothing(named.found, aside.found)
        unreadable = dict(named.unreadable)
        if not named.found and not revived:
            runs = _runs_of(aside.found)
            unreadable |= {name: error for name, error in aside.unreadable.items() if _is_left_for(name, without=runs)}
        found = tuple(oldest_first([*named.found, *revived]))
        return cls(found=found, unreadable=unreadable, unfinished=named.unfinished)


def _is_another_name(path: Path) -> bool:
    """Whether a path is a link to something beside it, which is listed by its own name."""
    return path.is_symlink() and os.path.dirname(os.path.realpath(path)) == os.path.realpath(path.parent)


def abandoned_for_nothing(
    found: Sequence[ListedCheckpoint], aside: Sequence[ListedCheckpoint]
) -> list[ListedCheckpoint]:
    """The checkpoints in ``aside`` that still count: the run that set them aside has no checkpoint itself. Pure.

    One counts if no checkpoint, in ``found`` or ``aside``, is of the run that set it aside or of a run that went on
    from that one; and if it led to the newest of ``found``, or the newest of ``found`` to it. Where it did not,
    training has gone on without it, and the checkpoints of the run that set it aside are gone by now.
    """
    runs, newest = _runs_of([*found, *aside]), newest_of(found)
    return [
        one
        for one in aside
        if _is_left_for(one.name, without=runs - _runs_of([one]))  # by its own run it was left under an older rule
        and (newest is None or _are_on_one_line(one.commit, newest.commit))
    ]


def is_name(name: str) -> bool:
    """Whether ``name`` is a checkpoint's name, step_N or epoch_N, committed or not."""
    return _NAME.fullmatch(name) is not None


def is_set_aside(name: str) -> bool:
    """Whether a folder of this name is a checkpoint that was set aside, as abandoned or as unreadable."""
    return _ASIDE.fullmatch(name) is not None


def left_for(name: str) -> set[str]:
    """The ids that the run which set a checkpoint aside may have, by the checkpoint's ``name``; empty if no run did.

    They are two where the name ends in ``-`` and a number, which is a part of the id or was added to free a name.
    """
    match = _ABANDONED.fullmatch(name)
    return set() if match is None else {match[1], match[2]}


def check_name(name: str) -> None:
    """ValueError unless ``name`` may be a checkpoint's name: step_N or epoch_N."""
    if not is_name(name):
        raise ValueError(f"a checkpoint is named {name[:80]!r}; allowed: step_N or epoch_N, with an integer N >= 0")


def oldest_first(found: Iterable[ListedCheckpoint]) -> list[ListedCheckpoint]:
    """The checkpoints ``found``, in the order in which they were saved."""
    return sorted(found, key=_age)


def newest_of(found: Sequence[ListedCheckpoint], chain: Sequence[Lineage] | None = None) -> ListedCheckpoint | None:
    """The newest of some checkpoints; with ``chain``, of those that lead to its state."""
    if chain is None:
        return max(found, key=_age, default=None)
    return next(iter(leading_to(chain, found)), None)


def leading_to(chain: Sequence[Lineage], found: Sequence[ListedCheckpoint]) -> list[ListedCheckpoint]:
    """The checkpoints that lead to the state of ``chain``, newest first: its runs saved them before they were left."""
    places = []
    for one in found:
        place = place_in(chain, run_id=one.commit.run_id, global_step=one.commit.global_step)
        if place is not None:
            places.append((place, one))
    return [one for _, one in sorted(places, key=lambda pair: (pair[0], _age(pair[1])), reverse=True)]


def _is_folder(path: Path) -> bool:
    """Whether a path is a folder, and no link to one; OSError where that cannot be told."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:  # renamed since its name was read
        return False


def _runs_of(found: Iterable[ListedCheckpoint]) -> set[str]:
    """The ids of all runs in the lineages of some checkpoints."""
    return {run.id for one in found for run in one.commit.lineage}


def _is_left_for(name: str, *, without: Collection[str]) -> bool:
    """Whether ``name`` is that of a checkpoint abandoned for a run that is not among ``without``."""
    named = left_for(name)
    return bool(named) and not named & set(without)


def _are_on_one_line(one: Commit, other: Commit) -> bool:
    """Whether one of two checkpoints led to the other."""
    return any(
        place_in(last.lineage, run_id=first.run_id, global_step=first.global_step) is not None
        for first, last in itertools.permutations([one, other])
    )


def _age(found: ListedCheckpoint) -> tuple[int, int, int, str, str]:
    """A sort key of a checkpoint: larger for each later save of a run, and for a run that goes on from another."""
    commit = found.commit
    return commit.global_step, len(commit.lineage), commit.epoch, commit.saved_at, found.name


# --- which checkpoints of a job stay, which may go, and why ----------------------------------------------------------
# What counts as kept is committed, has all its files, and leads to the newest checkpoint. Saves that failed, what
# cannot be read and what training went on without are never counted, so that none of them takes the place of a good
# one. What was abandoned for nothing counts as before.

_NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """A rule for which of a job's checkpoints are kept; the others are removed."""

    keep_last: int | None = 1
    """How many of the newest checkpoints are kept; None keeps all that lead to the newest one."""
    keep_every: int | None = None
    """A number of steps: the first checkpoint at or after each multiple of it is kept besides."""
    keep_abandoned: bool = True
    """Whether checkpoints that training went on without are kept."""

    def __post_init__(self) -> None:
        if self.keep_last is not None and (type(self.keep_last) is not int or self.keep_last < 1):
            raise ValueError(f"keep_last is {self.keep_last!r}; allowed: an integer >= 1, or None, which keeps all")
        if self.keep_every is not None and (type(self.keep_every) is not int or self.keep_every < 1):
            raise ValueError(f"keep_every is {self.keep_every!r}; allowed: a number of steps >= 1, or None")
        if self.keep_every is not None and self.keep_last is None:
            raise ValueError(f"keep_every is {self.keep_every} and keep_last None, which keeps all; give keep_last too")


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionVerdict:
    """Whether one checkpoint is kept or removed, and why."""

    found: ListedCheckpoint
    stays: bool
    why: str
    has_failed: bool = False
    """Whether the checkpoint stays because it could not be removed."""


def judge(
    found: Sequence[ListedCheckpoint],
    rule: Retention,
    *,
    chain: Sequence[Lineage] | None = None,
    being_read: Mapping[str, str] = _NOTHING,
    incomplete: Mapping[str, str] = _NOTHING,
) -> list[RetentionVerdict]:
    """Whether each checkpoint of ``found`` is kept by ``rule``, and why; oldest first. Removes nothing.

    ``chain`` are the runs that lead to now; by default those that lead to the newest one. ``being_read`` says of names
    who reads them, ``incomplete`` what they lack.
    """
    ordered = oldest_first(found)
    abandoned = _abandoned_in(ordered)
    if chain is None:
        newest = newest_of([one for one in ordered if one.name not in abandoned and one.name not in incomplete])
        chain = () if newest is None else newest.commit.lineage
    reasons = _reasons_to_stay(ordered, rule, chain, incomplete, abandoned)
    verdicts = []
    for one in ordered:
        why = reasons.get(one.name)
        if why is None and one.name in being_read:
            why = f"being read by {being_read[one.name]}"
        gone = "abandoned" if one.name in abandoned else f"none of the last {rule.keep_last}"
        verdicts.append(RetentionVerdict(found=one, stays=why is not None, why=why or gone))
    return verdicts


def _abandoned_in(found: Sequence[ListedCheckpoint]) -> set[str]:
    """The names of checkpoints that training went on without, and that do not count any more."""
    aside = [one for one in found if is_set_aside(one.name)]
    counting = abandoned_for_nothing([one for one in found if not is_set_aside(one.name)], aside)
    return {one.name for one in aside} - {one.name for one in counting}


def _reasons_to_stay(
    ordered: Sequence[ListedCheckpoint],
    rule: Retention,
    chain: Sequence[Lineage],
    incomplete: Mapping[str, str],
    abandoned: Collection[str],
) -> dict[str, str]:
    """Why each checkpoint that ``rule`` keeps is kept, by name; readers are not looked at."""
    reasons: dict[str, str] = {}
    on_the_way: list[tuple[int, ListedCheckpoint]] = []
    for one in ordered:
        place = place_in(chain, run_id=one.commit.run_id, global_step=one.commit.global_step)
        if one.name in incomplete:
            reasons[one.name] = f"not counted, since {incomplete[one.name]}"
        elif one.name in abandoned:
            if rule.keep_abandoned:
                reasons[one.name] = "abandoned, and not counted"
        elif place is None:
            reasons[one.name] = "not counted, since it does not lead to the newest one"
        else:
            on_the_way.append((place, one))
    counted = [one for _, one in sorted(on_the_way, key=lambda pair: pair[0])]
    if rule.keep_every is not None:
        reasons |= _milestones(counted, rule.keep_every)
    last = counted if rule.keep_last is None else counted[-rule.keep_last :]
    return reasons | {one.name: "the newest" if one is last[-1] else f"one of the last {len(last)}" for one in last}


def _milestones(counted: Sequence[ListedCheckpoint], every: int) -> dict[str, str]:
    """Why the first checkpoint at or after each multiple of ``every`` steps is kept, by name; 0 is no such multiple."""
    first: dict[int, ListedCheckpoint] = {}
    for one in counted:
        first.setdefault(one.commit.global_step // every, one)
    return {
        one.name: f"the first from step {stretch * every} on" for stretch, one in sorted(first.items()) if stretch > 0
    }
