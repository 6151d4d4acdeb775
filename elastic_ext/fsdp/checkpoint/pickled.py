"""Pickled: which classes and functions a pickle names, found without running any of it. Pure.

Loading a pickle calls what it names, with arguments of its choice. Who knows what a pickle of a kind has to name can
refuse any that names more.
"""

from __future__ import annotations

import io
import pickletools
from array import array
from collections.abc import Iterator

__all__ = ["globals_of"]

_STRINGS = frozenset(
    {"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "STRING", "BINSTRING", "SHORT_BINSTRING"}
)
_PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_GETS = frozenset({"GET", "BINGET", "LONG_BINGET"})
_NEITHER = frozenset({"PROTO", "FRAME"})
_NO_TEXT = -1


def globals_of(data: bytes) -> set[str]:
    """The dotted names of all that loading ``data`` looks up; ValueError where that cannot be told for certain.

    Newer pickles name a thing by two texts that were put down just before, or noted earlier: both are followed.
    """
    found: set[str] = set()
    memo = array("q")  # where the texts are that were noted: there may be millions
    last = [_NO_TEXT, _NO_TEXT]  # where the texts are that were put down last
    for name, argument, position in _operations(data):
        if name in _NEITHER:
            continue
        if name == "MEMOIZE" or name in _PUTS:
            number = len(memo) if name == "MEMOIZE" else int(argument)  # type: ignore[call-overload]
            if not 0 <= number <= len(memo):
                raise ValueError("it notes something in a way that no pickler does")
            memo[number : number + 1] = array("q", last[-1:])
        elif name in _GETS:
            number = int(argument)  # type: ignore[call-overload]
            last = [last[-1], memo[number] if 0 <= number < len(memo) else _NO_TEXT]
        elif name in _STRINGS:
            last = [last[-1], position]
        else:
            if name in ("GLOBAL", "INST"):
                found.add(str(argument).replace(" ", ".", 1))
            elif name == "STACK_GLOBAL":
                if _NO_TEXT in last:
                    raise ValueError("it names something in a way that no pickler does")
                found.add(".".join(_text_at(data, place) for place in last))
            elif name in ("EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID"):
                raise ValueError(f"it uses {name}, which only its own program can tell the meaning of")
            last = [_NO_TEXT, _NO_TEXT]
    return found


def _text_at(data: bytes, position: int) -> str:
    """The text that is put down there."""
    file = io.BytesIO(data)
    file.seek(position)
    _, argument, _ = next(pickletools.genops(file))
    return str(argument)


def _operations(data: bytes) -> Iterator[tuple[str, object, int]]:
    """Each with where it is."""
    num_done = 0
    for operation, argument, position in pickletools.genops(data):
        yield operation.name, argument, position or 0
        num_done = (position or 0) + 1
    if num_done != len(data):
        raise ValueError(f"it ends {len(data) - num_done} bytes before the file does")
