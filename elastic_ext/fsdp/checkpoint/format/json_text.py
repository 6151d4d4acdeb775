"""JSON of any length read in little memory, the names of number types, and the refusal of unknown formats."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NoReturn

from elastic_ext.errors import CheckpointError

__all__ = ["ITEM_BYTES", "JsonText", "Long", "unknown_format"]


# --- a JSON document gone through in little memory, however long it is -----------------------------------------------
# Python's own decoder reads one value after another out of a piece of the text. What is longer than a piece is gone
# through element by element, and only its beginning is kept.

_AHEAD = 1 << 18  # characters that are there before a value is read: one that fits in is read at once
_BEGINNING = 200
_TAIL = len("e+")  # what may stand behind digits where a number goes on
_SPACE = re.compile(r"[ \t\n\r]*")
_CLOSING = {"{": "}", "[": "]"}
_STRING = r'"[^"\\\x00-\x1f]*"'
_SCALAR = rf"(?:{_STRING}|-?(?:0|[1-9][0-9]{{0,99}})(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null)[ \t\n\r]*,"
_MANY = {
    "[": re.compile(rf"(?:[ \t\n\r]*{_SCALAR}){{0,1000}}"),
    "{": re.compile(rf"(?:[ \t\n\r]*{_STRING}[ \t\n\r]*:[ \t\n\r]*{_SCALAR}){{0,1000}}"),
}
"""Patterns of many simple elements of a list or an object, each with its comma; others go to the decoder."""


@dataclass(frozen=True, slots=True)
class Long:
    """Stands for a list or an object of JSON that is too long to be held in memory."""

    beginning: str
    """The first characters of the list or object, as they stand in the document."""


class JsonText:
    """A JSON document of any length, given in ``pieces``, gone through once. ValueError where it is no JSON, and
    RecursionError where it nests too deeply. Values of up to ``ahead`` characters are never long.
    """

    def __init__(self, pieces: Iterable[bytes | memoryview], *, ahead: int = _AHEAD) -> None:
        self._pieces = codecs.iterdecode(map(bytes, pieces), "utf-8", "surrogatepass")
        self._ahead = ahead
        self._text = ""  # a part of it, of which all before ``at`` has been read
        self._at = 0
        self._num_before = 0  # characters that are not there any more
        self._has_ended = False

    def members(self, is_wanted: Callable[[str], bool] = lambda key: False) -> Iterator[tuple[str, object]]:
        """The members of the document's object, one by one; long values as ``Long``, but for the keys wanted."""
        if self._next() != "{":
            self._refuse("an object should begin")
        yield from self._members(is_wanted)
        self._end()

    def check(self) -> None:
        """Go through all of the document; ValueError where it is no JSON."""
        self._value(is_wanted=False)
        self._end()

    def _end(self) -> None:
        if self._next():
            self._refuse("Extra data")

    def _members(self, is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, object]]:
        self._at += 1
        if self._next() == "}":
            self._at += 1
            return
        while True:
            key = self._key()
            yield key, self._value(is_wanted=is_wanted(key))
            if self._has_closed("{"):
                return

    def _pass_over(self, opening: str) -> None:
        """Go through a list or an object that is too long to be held."""
        self._at += 1
        if self._next() == _CLOSING[opening]:
            self._at += 1
            return
        while True:
            self._fill(self._ahead)
            several = _MANY[opening].match(self._text, self._at)
            assert several is not None
            if several.end() > self._at:
                self._at = several.end()
                continue
            if opening == "{":
                self._key()
            self._value(is_wanted=False)
            if self._has_closed(opening):
                return

    def _has_closed(self, opening: str) -> bool:
        """Read what follows an element: whether that is the end of the list or object, and no comma."""
        following = self._next()
        if following != _CLOSING[opening] and following != ",":
            self._refuse("Expecting ',' delimiter")
        self._at += 1
        return following != ","

    def _key(self) -> str:
        if self._next() != '"':
            self._refuse("Expecting property name enclosed in double quotes")
        key = self._value(is_wanted=True)
        assert isinstance(key, str)
        if self._next() != ":":
            self._refuse("Expecting ':' delimiter")
        self._at += 1
        return key

    def _value(self, *, is_wanted: bool) -> object:
        """The next value; as ``Long`` where it is a list or an object that is long and not wanted."""
        first = self._next()
        self._fill(self._ahead)
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
                if end + _TAIL < len(self._text) or self._has_ended:
                    self._at = end
                    return value
            except json.JSONDecodeError as error:
                if self._has_ended:
                    self._refuse(error.msg, error.pos)
                if first in _CLOSING and not is_wanted:
                    beginning = self._text[self._at : self._at + _BEGINNING]
                    self._pass_over(first)
                    return Long(beginning)
            self._fill(2 * (len(self._text) - self._at))

    def _next(self) -> str:
        """Skip white space, and give the character after it, still unread; "" at the end of the document."""
        while True:
            space = _SPACE.match(self._text, self._at)
            assert space is not None
            self._at = space.end()
            if self._at < len(self._text) or self._has_ended:
                return self._text[self._at : self._at + 1]
            self._fill(1)

    def _fill(self, num_characters: int) -> None:
        """Have at least so many unread characters in memory, as far as the document has them."""
        missing = num_characters - (len(self._text) - self._at)
        if missing <= 0 or self._has_ended:
            return
        parts = [self._text[self._at :]]
        while missing > 0:
            piece = next(self._pieces, "")
            if not piece:
                self._has_ended = True
                break
            parts.append(piece)
            missing -= len(piece)
        self._num_before += self._at
        self._at = 0
        self._text = "".join(parts)

    def _refuse(self, what: str, at: int | None = None) -> NoReturn:
        raise ValueError(f"{what}: character {self._num_before + (self._at if at is None else at)}")


_DECODER = json.JSONDecoder()


# --- what is said of a file whose format this library does not know: it is neither damaged nor absent ----------------


def unknown_format(where: object, number: object, known: object, saved_with: object = None) -> CheckpointError:
    """The error for a file of an unknown format; ``saved_with`` are the versions that COMMIT names."""
    versions = saved_with.items() if isinstance(saved_with, dict) else ()
    told = ", ".join(f"{name} {version}" for name, version in versions)
    which = f" (it was saved with {told})" if told else ""
    return CheckpointError(
        f"{where} has format {number}, and this elastic_ext reads formats up to {known}: it is not damaged. Use a "
        f"newer elastic_ext{which}, or move the checkpoint's folder away to go on without it"
    )


# --- types of numbers by the names that safetensors gives them, and how much memory one number takes -----------------

ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "F64": 8,
        "F32": 4,
        "F16": 2,
        "BF16": 2,
        "F8_E4M3": 1,
        "F8_E5M2": 1,
        "F8_E4M3FNUZ": 1,
        "F8_E5M2FNUZ": 1,
        "F8_E8M0": 1,
        "C64": 8,
        "I64": 8,
        "I32": 4,
        "I16": 2,
        "I8": 1,
        "U64": 8,
        "U32": 4,
        "U16": 2,
        "U8": 1,
        "BOOL": 1,
    }
)
"""How many bytes one number takes, by the name that safetensors gives its type."""
