"""Appliers: what puts sections of a config into effect, asked and called on every rank alike.

Whose config comes next is decided elsewhere (rounds.py); here all ranks check it, and all apply it or none.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from .config import SECTIONS, ElasticConfig, section_of
from .errors import ApplyError, RanksFailedError
from .rules import Value
from .strict_json import shown

if TYPE_CHECKING:
    from .ranks import Ranks

__all__ = ["Applied", "Applier", "Appliers", "FunctionApplier"]


class Applier(Protocol):
    """What puts one section of a config into effect on this rank."""

    @property
    def section(self) -> str:
        """Its name, one of config.SECTIONS."""

    def check(self, new: ElasticConfig) -> str | None:
        """Why ``new`` cannot be applied here, None where it can. Changes nothing. Called on every rank."""

    def apply(self, old: ElasticConfig, new: ElasticConfig) -> None:
        """Put the section of ``new`` into effect. Called on every rank, when the section differs from ``old``.

        An exception here ends the run on all ranks.
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
        """Every rank's reasons against ``new``, by rank; an applier that raises is an error on all ranks."""
        reasons: list[str] = []
        trace = ""
        try:
            for applier in self._appliers:
                reason = applier.check(new)
                if reason is not None:
                    reasons.append(f"{applier.section}: {reason}")
        except Exception:  # whatever an applier raises, every rank must hear of it
            trace = traceback.format_exc()
        doing = f"checking {new.label}"
        answer = json.dumps({"reasons": reasons, "traceback": trace}).encode()
        answers = [json.loads(data) for data in self._ranks.gather(answer, doing)]
        failed = {rank: answer["traceback"] for rank, answer in enumerate(answers) if answer["traceback"]}
        if failed:
            raise RanksFailedError(doing, self._ranks.world_size, failed)
        return {rank: answer["reasons"] for rank, answer in enumerate(answers) if answer["reasons"]}

    def apply(self, old: ElasticConfig, new: ElasticConfig, step: int) -> Applied:
        """Apply what differs, in the order of config.SECTIONS; if one rank fails, all raise ApplyError."""
        changed = {section_of(path) for path in old.differences(new)}
        error: Exception | None = None
        try:
            for section in SECTIONS:
                for applier in self._appliers:
                    if applier.section == section and section in changed:
                        applier.apply(old, new)
        except Exception as caught:  # whatever an applier raises, every rank must hear of it
            error = caught
        self._ranks.all_or_raise(error, f"applying {new.label}", ApplyError)
        return Applied(old=old, new=new, step=step)
