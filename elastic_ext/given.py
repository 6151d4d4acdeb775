"""What a user may give: one thing or several, one of some choices, a path."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

__all__ = ["as_list", "check_choice", "check_flag", "expanded", "names_given", "path_given"]

_EMPTY = "is '', as where a variable is not set; allowed: a path, and '.' for the current folder"


def as_list(given: Any) -> list[Any]:
    """None, one thing, or a list or tuple of some, as a list."""
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def check_choice(name: str, value: object, allowed: Sequence[str | bool | None]) -> None:
    """ValueError unless it is one of those; 0 and 1 are neither False nor True."""
    if not any(value is one or (isinstance(value, str) and value == one) for one in allowed):
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(map(str, allowed))}")


def check_flag(name: str, value: object) -> None:
    """ValueError unless it is True or False: any other text would be true, and so would "False"."""
    check_choice(name, value, (True, False))


def path_given(name: str, value: object) -> Path:
    """``value`` as a path; ValueError for what is none, and for no text, which would be the current folder."""
    if not isinstance(value, (str, Path)):
        raise ValueError(f"{name} is {value!r}; allowed: a path, as text or as a pathlib.Path")
    if value == "":
        raise ValueError(f"{name} {_EMPTY}")
    return Path(value)


def names_given(name: str, value: object) -> list[str]:
    """``value`` as a list of names; ValueError for what is none, such as one name by itself, whose letters it has."""
    if isinstance(value, Collection) and not isinstance(value, (str, bytes)):
        found = list(value)
        if all(isinstance(one, str) for one in found):
            return found
    raise ValueError(f"{name} is {value!r}; allowed: a list of names")


def expanded(path: str | Path) -> Path:
    """``path`` with a ``~`` at its beginning replaced; ValueError where there is no such home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # ~name, and there is no such user
        raise ValueError(f"{path}: {error}; allowed: a path, with ~ for a home folder that exists") from None
