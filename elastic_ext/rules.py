"""What a single config value may be: each rule checks one value and says in words what it allows."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from .records.json import MAX_DEPTH, can_be_written, shown

__all__ = [
    "TORCH",
    "BlocksOrWhole",
    "Boolean",
    "Bounds",
    "Choice",
    "Integer",
    "KnobBounds",
    "Knobs",
    "Number",
    "OrTorch",
    "Rule",
    "Text",
    "UserValue",
    "UserValueRule",
    "Value",
    "nearest",
]

TORCH = "torch"
"""The word for a setting that is left to torch."""
LARGEST_INTEGER = 2**53 - 1  # what every JSON reader keeps exactly
_MOST_LISTS = MAX_DEPTH - 2  # a user's value lies inside two objects
_MOST_KNOBS_SHOWN = 5
_SURE = 0.95  # as like as that are names with the same initials

UserValue: TypeAlias = "bool | int | float | str | tuple[UserValue, ...] | None"
KnobBounds: TypeAlias = tuple[UserValue, ...]
Value: TypeAlias = "UserValue | dict[str, KnobBounds]"


class Rule(Protocol):
    """One value's rule. ``check`` gives the value as it is kept; ValueError means that it is not allowed."""

    @property
    def allowed(self) -> str: ...

    def check(self, value: object) -> Value: ...


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number, written without a fraction; true and false are not numbers."""

    at_least: int
    at_most: int = LARGEST_INTEGER

    @property
    def allowed(self) -> str:
        upper = "" if self.at_most == LARGEST_INTEGER else f" and <= {self.at_most}"
        return f"an integer >= {self.at_least}{upper}"

    def check(self, value: object) -> int:
        if type(value) is int and value > self.at_most:
            raise ValueError(f"an integer >= {self.at_least} and <= {self.at_most}")
        if type(value) is not int or value < self.at_least:
            raise ValueError(self.allowed)
        return value


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number, kept as a float."""

    above: float | None = None
    at_least: float | None = None
    at_most: float | None = None

    @property
    def allowed(self) -> str:
        bounds = [
            f"> {self.above:g}" if self.above is not None else "",
            f">= {self.at_least:g}" if self.at_least is not None else "",
            f"<= {self.at_most:.12g}" if self.at_most is not None else "",
        ]
        return "a number " + " and ".join(bound for bound in bounds if bound)

    def check(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(self.allowed)
        try:
            number = float(value)
        except OverflowError:
            raise ValueError(self.allowed) from None
        inside = (
            math.isfinite(number)
            and (self.above is None or number > self.above)
            and (self.at_least is None or number >= self.at_least)
            and (self.at_most is None or number <= self.at_most)
        )
        if not inside:
            raise ValueError(self.allowed)
        return number


@dataclass(frozen=True, slots=True)
class Boolean:
    """true or false."""

    allowed: str = "true or false"

    def check(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise ValueError(self.allowed)
        return value


@dataclass(frozen=True, slots=True)
class Text:
    """Text of a bounded length."""

    at_most: int = 2000

    @property
    def allowed(self) -> str:
        return f"text of at most {self.at_most} characters"

    def check(self, value: object) -> str:
        if not isinstance(value, str) or len(value) > self.at_most or not can_be_written(value):
            raise ValueError(self.allowed)
        return value


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words."""

    words: tuple[str, ...]

    @property
    def allowed(self) -> str:
        return "one of " + ", ".join(f'"{word}"' for word in self.words)

    def check(self, value: object) -> str:
        if not isinstance(value, str) or value not in self.words:
            raise ValueError(self.allowed)
        return value


@dataclass(frozen=True, slots=True)
class BlocksOrWhole:
    """How many blocks make one unit, or the whole model."""

    allowed: str = 'an integer >= 1 (blocks), or "whole"'

    def check(self, value: object) -> int | str:
        if value == "whole":
            return "whole"
        try:
            return Integer(1).check(value)
        except ValueError:
            raise ValueError(self.allowed) from None


@dataclass(frozen=True, slots=True)
class OrTorch:
    """What another rule allows, or the word that leaves it to torch, as where a script says nothing."""

    number: Rule

    @property
    def allowed(self) -> str:
        return f'{self.number.allowed}, or "{TORCH}"'

    def check(self, value: object) -> Value:
        if value == TORCH:
            return TORCH
        try:
            return self.number.check(value)
        except ValueError:
            raise ValueError(self.allowed) from None


@dataclass(frozen=True, slots=True)
class UserValueRule:
    """A JSON scalar or a list of such values; lists are kept as tuples, so that nobody changes them in place."""

    allowed: str = "a JSON scalar or a list of scalars or lists"

    def check(self, value: object) -> UserValue:
        return self._kept(value, _MOST_LISTS)

    def _kept(self, value: object, num_levels: int) -> UserValue:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            if not can_be_written(value):
                raise ValueError("text of whole Unicode characters")
            return value
        if isinstance(value, int):
            if abs(value) > LARGEST_INTEGER:
                raise ValueError(f"integers of at most {LARGEST_INTEGER} in size")
            return value
        if isinstance(value, float):
            if not math.isfinite(value):
                raise ValueError("finite numbers")
            return value
        if isinstance(value, (list, tuple)):
            if num_levels == 0:
                raise ValueError(f"lists in lists, at most {_MOST_LISTS} deep")
            return tuple([self._kept(item, num_levels - 1) for item in value])
        raise ValueError(self.allowed)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a tuner may choose for one knob: two numbers are a range [min, max], any other list holds the choices."""

    knob: Rule

    @property
    def allowed(self) -> str:
        return f"[min, max] or a list of choices, each {self.knob.allowed}"

    def check(self, value: object) -> KnobBounds:
        if not isinstance(value, (list, tuple)) or not value:
            raise ValueError(self.allowed)
        try:
            choices = tuple(self.knob.check(item) for item in value)
        except ValueError:
            raise ValueError(self.allowed) from None
        kept = tuple(choice for choice in choices if not isinstance(choice, dict))
        if len(kept) == 2 and _is_number(kept[0]) and _is_number(kept[1]) and kept[0] > kept[1]:  # type: ignore[operator]
            raise ValueError(f"{self.allowed}, the smaller number first")
        return kept


@dataclass(frozen=True, slots=True)
class Knobs:
    """An object that gives bounds for some of the knobs in ``rules``."""

    rules: Mapping[str, Rule]
    allowed: str = "an object: per knob [min, max] or a list of choices"

    def check(self, value: object) -> dict[str, KnobBounds]:
        if not isinstance(value, Mapping):
            raise ValueError(self.allowed)
        kept: dict[str, KnobBounds] = {}
        faults: list[str] = []
        for name, bounds in value.items():
            if len(faults) == _MOST_KNOBS_SHOWN:
                break
            if name not in self.rules:
                faults.append(f'known knobs; {shown(name)} is none, the nearest is "{nearest(name, self.rules)}"')
                continue
            try:
                kept[name] = Bounds(self.rules[name]).check(bounds)
            except ValueError as error:
                faults.append(f'for "{name}" {error}')
        if faults:
            raise ValueError("; ".join(faults))
        return kept


def nearest(name: str, known: Iterable[str]) -> str:
    """The known dotted name most like ``name``: as a whole, by its last part, or by that part's initials."""
    given = str(name)[:100]
    given_last = given.rpartition(".")[2]

    def likeness(candidate: str) -> float:
        last = candidate.rpartition(".")[2]
        initials = "".join(word[:1] for word in last.split("_"))
        if len(initials) > 1 and given_last.lower() == initials:
            return _SURE
        whole = difflib.SequenceMatcher(None, given, candidate).ratio()
        return max(whole, difflib.SequenceMatcher(None, given_last, last).ratio())

    return max(known, key=likeness)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
