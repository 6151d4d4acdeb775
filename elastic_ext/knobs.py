"""Knobs: values that a script reads by name while it runs, of the types that it expects."""

from __future__ import annotations

from collections.abc import Set

from .appliers import Applied
from .config import ElasticConfig
from .errors import ConfigError, Refusal
from .keys import KEYS, section_of
from .records.json import shown

__all__ = ["Knobs"]


class Knobs:
    """The names that a script has read so far; the applier of the section ``user``."""

    section = "user"

    def __init__(self) -> None:
        self._defaults: dict[str, object] = {}

    def read(self, config: ElasticConfig, name: str, default: object) -> object:
        """The value in force, ``default`` where there is none; ConfigError if it is of another type."""
        path = name if name in KEYS else f"user.{name}"
        self._defaults[path] = default
        value = config.get(path)
        if value is None:
            return default
        reason = _unlike(path, value, default)
        if reason is not None:
            raise ConfigError([reason])
        return float(value) if isinstance(default, float) and isinstance(value, int) else value

    def was_read(self, path: str) -> bool:
        """Whether the script has asked for this dotted key."""
        return path in self._defaults

    def unread(self, applied: Applied, sections: Set[str]) -> list[str]:
        """The dotted keys that a config sets, that nothing applies and that the script has not read."""
        applying = sections - {self.section} | {"checkpoint", "tuning"}
        given = [path for path, (_, value) in applied.changes.items() if value is not None]
        return [path for path in given if section_of(path) not in applying and not self.was_read(path)]

    def check(self, new: ElasticConfig) -> str | None:
        """The knobs whose values would be of another type than the script expects."""
        values = new.values()
        reasons = [_unlike(path, values.get(path), default) for path, default in self._defaults.items()]
        return "; ".join(str(reason) for reason in reasons if reason is not None) or None

    def apply(self, old: ElasticConfig, new: ElasticConfig) -> None:
        """Nothing to do: ``read`` looks at the config in force."""


def _unlike(path: str, value: object, default: object) -> Refusal | None:
    """Why ``value`` is not of the type that ``default`` promises; any type will do where there is no default."""
    if value is None or default is None or path in KEYS:
        return None
    kinds: tuple[tuple[type | tuple[type, ...], str], ...] = (
        (bool, "true or false"),
        (int, "an integer"),
        ((float, int), "a number"),
        (str, "text"),
        ((tuple, list), "a list"),
    )
    for kind, words in kinds:
        if isinstance(default, kind):
            fits = isinstance(value, kind) and isinstance(value, bool) == isinstance(default, bool)
            advice = f"the script starts with {shown(default)}"
            return None if fits else Refusal(key=path, given=shown(value), allowed=words, advice=advice)
    return None
