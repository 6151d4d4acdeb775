"""Values in words, arguments that users give, and progress bars."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

__all__ = [
    "Progress",
    "age_in_words",
    "as_list",
    "check_choice",
    "check_flag",
    "counted",
    "cut",
    "expanded",
    "names_given",
    "on_one_line",
    "path_given",
    "size_in_words",
    "wrapped",
]


# --- values in words, for people: sizes, ages, and text that cannot steer a terminal ---------------------------------

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_LEAST_WIDTH = 20
_STEPS = (("d", 86400), ("h", 3600), ("min", 60))


def size_in_words(num_bytes: int) -> str:
    """A number of bytes in words, with three digits and a unit, such as ``1.50 GiB``."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    size = float(num_bytes)
    for unit in _UNITS:
        size /= 1024
        if size < 999.5 or unit == _UNITS[-1]:
            break
    return f"{size:.{2 if size < 9.995 else 1 if size < 99.95 else 0}f} {unit}"


def age_in_words(seconds: float) -> str:
    """An age in words, in the largest unit that fits, rounded down, such as ``3 h``; a negative one is ``0 s``."""
    for unit, length in _STEPS:
        if seconds >= length:
            return f"{int(seconds / length)} {unit}"
    return f"{max(int(seconds), 0)} s"


def counted(number: int, noun: str) -> str:
    """A number with its noun, in the plural where it is not 1, such as ``1 node`` and ``2 nodes``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def on_one_line(text: str) -> str:
    """``text`` without line breaks and other characters that steer a terminal."""
    return "".join(character if character.isprintable() else " " for character in text)


def wrapped(text: str, width: int | None, *, first: str = "", rest: str = "") -> list[str]:
    """A sentence on lines of at most ``width`` characters, of which one that has no space may be longer.

    The first begins with ``first``, the others with ``rest``. All is on one line where ``width`` is None, as where the
    output is no terminal.
    """
    line = first + on_one_line(text)
    if width is None or len(line) <= width:
        return [line]
    wrapper = textwrap.TextWrapper(
        width=max(width, len(rest) + _LEAST_WIDTH),
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
        drop_whitespace=True,
    )
    return wrapper.wrap(line)


def cut(text: str, width: int | None) -> str:
    """A line that is cut to ``width`` characters, the last three of which say so; whole where ``width`` is None."""
    line = on_one_line(text)
    return line if width is None or len(line) <= width else f"{line[: max(width - 3, 0)]}..."


# --- what a user may give: one thing or several, one of some choices, a path -----------------------------------------

_EMPTY = "is '', as where a variable is not set; allowed: a path, and '.' for the current folder"


def as_list(given: Any) -> list[Any]:
    """A user's argument as a list: of nothing for None, of one thing, or of the items of a list or tuple."""
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def check_choice(name: str, value: object, allowed: Sequence[str | bool | None]) -> None:
    """ValueError unless ``value`` is one of ``allowed``; 0 and 1 are neither False nor True."""
    if not any(value is one or (isinstance(value, str) and value == one) for one in allowed):
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(map(str, allowed))}")


def check_flag(name: str, value: object) -> None:
    """ValueError unless ``value`` is True or False, since any text would count as true, "False" too."""
    check_choice(name, value, (True, False))


def path_given(name: str, value: object) -> Path:
    """``value`` as a path; ValueError for what is no path, and for empty text, which would be the current folder."""
    if not isinstance(value, (str, Path)):
        raise ValueError(f"{name} is {value!r}; allowed: a path, as text or as a pathlib.Path")
    if value == "":
        raise ValueError(f"{name} {_EMPTY}")
    return Path(value)


def names_given(name: str, value: object) -> list[str]:
    """``value`` as a list of names; ValueError for anything else, such as one name, which would give its letters."""
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


# --- a bar on a terminal, of the steps of an epoch or of bytes -------------------------------------------------------


class Progress:
    """A progress bar on a terminal, from ``begin`` to ``end``; where it is not shown, nothing happens."""

    def __init__(self, *, is_shown: bool, unit: Literal["step", "B"] = "step") -> None:
        self.is_shown = is_shown
        self._unit = unit
        self._bar: Any = None

    def begin(self, description: str, total: int | None) -> None:
        if self.is_shown:
            from tqdm.auto import tqdm  # for those who look: it costs every start some milliseconds

            is_scaled = self._unit == "B"
            self._bar = tqdm(
                desc=description, total=total, unit=self._unit, unit_scale=is_scaled, unit_divisor=1024, leave=False
            )

    def advance(self, number: int = 1) -> None:
        if self._bar is not None:
            self._bar.update(number)

    def note(self, words: str) -> None:
        """Show ``words`` behind the bar."""
        if self._bar is not None:
            self._bar.set_postfix_str(words)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
