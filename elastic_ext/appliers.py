"""Appliers: what puts sections of a config into effect, asked and called on every rank alike.

Whose config comes next is decided elsewhere (rounds.py); here all ranks check it, and all apply it or none.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from .config import ElasticConfig
from .errors import ApplyError, RanksFailedError
from .keys import SECTIONS, section_of
from .ranks.heartbeat import Activity, Pulse
from .records.json import shown
from .rules import Value

if TYPE_CHECKING:
    from .ranks.group import Ranks

__all__ = ["Applied", "Applier", "Appliers", "Declined", "FunctionApplier", "Later"]

_MOST_TRACEBACK = 20_000


class Declined(Exception):
    """Raised in ``apply``, on all ranks at once, before anything was applied: it cannot be, and all is as it was."""


class Later(Exception):
    """Raised in ``check``, once training has begun: the next step tells whether it can be, and ranks then ask again."""


class Applier(Protocol):
    """What puts one section of a config into effect on this rank."""

    @property
    def section(self) -> str:
        """Its name, one of config.SECTIONS."""

    def check(self, new: ElasticConfig) -> str | None:
        """Why ``new`` cannot be applied here, None where it can. Changes nothing. Called on every rank."""

    def apply(self, old: ElasticConfig, new: ElasticConfig) -> None:
        """Put the section of ``new`` into effect. Called on every rank, when the section differs from ``old``.

        An exception here ends the run on all ranks; all but Declined.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionApplier:
    """Two functions as an applier; without ``checking`` it refuses nothing."""

    section: str
    checking: Callable[[ElasticConfig], str | None] | None
    applying: Callable[[ElasticConfig, ElasticConfig], None]

    def check(self, new: ElasticConfig) -> str | None:
        return None if self.checking is None else self.checking(new)

    def apply(self, old: ElasticConfig, new: ElasticConfig) -> None:
        self.applying(old, new)


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """A config that came into force."""

    old: ElasticConfig
    new: ElasticConfig
    step: int
    """The first step that runs under it."""

    @property
    def changes(self) -> dict[str, tuple[Value, Value]]:
        """Each key that differs: what it was and what it is."""
        return self.old.differences(self.new)

    def __str__(self) -> str:
        changes = ", ".join(f"{path} {shown(old)} -> {shown(new)}" for path, (old, new) in self.changes.items())
        reason = f" ({shown(self.new.reason, 200)[1:-1]})" if self.new.reason else ""
        return f"{self.new.label} in force from step {self.step}: {changes or 'nothing differs'}{reason}"


class Appliers:
    """One rank's appliers; ``check`` and ``apply`` are called by all ranks together.

    One with ``only_checks`` may refuse a change of its section, and gives none effect.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._appliers: list[Applier] = []
        self.pulse = Pulse()
        """Where it is noted that a config is checked or applied."""

    def add(self, applier: Applier) -> None:
        """Ask and call ``applier`` from the next change on."""
        if applier.section not in SECTIONS:
            raise ValueError(f"section is {applier.section!r}; allowed: one of {', '.join(SECTIONS)}")
        self._appliers.append(applier)

    @property
    def sections(self) -> frozenset[str]:
        """The sections that something here applies."""
        return frozenset(each.section for each in self._appliers if not getattr(each, "only_checks", False))

    def check(self, new: ElasticConfig) -> dict[int, list[str]]:
        """Every rank's reasons against ``new``, by rank; an applier that raises is an error on all ranks.

        All raise Later where one does and none has a reason.
        """
        with self.pulse.during(Activity.CHANGING):
            return self._check(new)

    def _check(self, new: ElasticConfig) -> dict[int, list[str]]:
        reasons: list[str] = []
        failure: Exception | None = None
        is_later = False
        try:
            for applier in self._appliers:
                try:
                    reason = applier.check(new)
                except Later:
                    is_later = True
                    continue
                if reason is not None:
                    reasons.append(f"{applier.section}: {reason}")
        except Exception as error:  # whatever an applier raises, every rank must hear of it
            failure = error
        doing = f"checking {new.label}"
        return self._reasons_of_all(reasons, failure, doing, RanksFailedError, is_later=is_later)

    def apply(self, old: ElasticConfig, new: ElasticConfig) -> dict[int, list[str]]:
        """Apply what differs, in the order of config.SECTIONS; gives every rank's reasons where it was declined.

        If one rank fails, all raise ApplyError.
        """
        with self.pulse.during(Activity.CHANGING):
            return self._apply(old, new)

    def _apply(self, old: ElasticConfig, new: ElasticConfig) -> dict[int, list[str]]:
        changed = {section_of(path) for path in old.differences(new)}
        concerned = [each for section in SECTIONS for each in self._appliers if section == each.section in changed]
        reasons: list[str] = []
        num_applied, failure = 0, None
        try:
            for applier in concerned:
                applier.apply(old, new)
                num_applied += 1
        except Exception as error:  # whatever an applier raises, every rank must hear of it
            if isinstance(error, Declined) and num_applied == 0:
                reasons.append(f"{applier.section}: {error}")
            else:
                failure = error
        return self._reasons_of_all(reasons, failure, f"applying {new.label}", ApplyError)

    def _reasons_of_all(
        self,
        reasons: list[str],
        failure: Exception | None,
        doing: str,
        kind: type[RanksFailedError],
        *,
        is_later: bool = False,
    ) -> dict[int, list[str]]:
        """By rank, where there are some. Raises on all ranks where one has failed, or has to be asked later."""
        trace = "" if failure is None else "".join(traceback.format_exception(failure))[-_MOST_TRACEBACK:]
        answer = json.dumps({"reasons": reasons, "traceback": trace, "is_later": is_later}).encode()
        answers = [json.loads(data) for data in self._ranks.gather(answer, doing)]
        failed = {rank: answer["traceback"] for rank, answer in enumerate(answers) if answer["traceback"]}
        if failed:
            raise kind(doing, self._ranks.world_size, failed) from failure
        found = {rank: answer["reasons"] for rank, answer in enumerate(answers) if answer["reasons"]}
        if not found and any(answer["is_later"] for answer in answers):
            raise Later
        return found
