"""Pickled: which classes and functions a pickle names, found without running any of it. Pure.

Loading a pickle calls what it names, with arguments of its choice. Who knows what a pickle of a kind has to name can
refuse any that names more.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator

__all__ = ["globals_of"]

_STRINGS = frozenset(
    {"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "STRING", "BINSTRING", "SHORT_BINSTRING"}
)
_PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_GETS = frozenset({"GET", "BINGET", "LONG_BINGET"})
_NEITHER = frozenset({"PROTO", "FRAME"})


def globals_of(data: bytes) -> set[str]:
    """The dotted names of all that loading ``data`` looks up; ValueError where that cannot be told for certain.

    Newer pickles name a thing by two texts that were put down just before, or noted earlier: both are followed.
    """
    found: set[str] = set()
    memo: dict[int, str | None] = {}
    last: list[str | None] = [None, None]  # the texts that were put down last, None for anything else
    for name, argument in _operations(data):
        if name in _NEITHER:
            continue
        if name == "MEMOIZE":
            memo[len(memo)] = last[-1]
        elif name in _PUTS:
            memo[int(argument)] = last[-1]  # type: ignore[call-overload]
        elif name in _GETS:
            last = [last[-1], memo.get(int(argument))]  # type: ignore[call-overload]
        elif name in _STRINGS:
            last = [last[-1], str(argument)]
        else:
            if name in ("GLOBAL", "INST"):
                found.add(str(argument).replace(" ", ".", 1))
            elif name == "STACK_GLOBAL":
                if last[0] is None or last[1] is None:
                    raise ValueError("it names something in a way that no pickler does")
                found.add(f"{last[0]}.{last[1]}")
            elif name in ("EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID"):
                raise ValueError(f"it uses {name}, which only its own program can tell the meaning of")
            last = [None, None]
    return found


def _operations(data: bytes) -> Iterator[tuple[str, object]]:
    num_done = 0
    for operation, argument, position in pickletools.genops(data):
        yield operation.name, argument
        num_done = (position or 0) + 1
    if num_done != len(data):
        raise ValueError(f"it ends {len(data) - num_done} bytes before the file does")
