"""What a pickle of torch.save would have torch make, found out before torch makes it: nothing larger than the pickle.

torch's ``weights_only`` calls the few names that it trusts, with arguments of the pickle's choice: a ``bytearray`` of a
number is that large, a tensor's class makes one of any size, and tuples in tuples as a key end the process. Here the
same operations are gone through with stand-ins, and torch is given what passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .pickled import Made, Named, StrangeName, Unpickler

__all__ = ["check_saved_values"]

_MOST_COPIED = 4  # characters and items that calls are given, per byte of a pickle
_LATIN = ("latin1", "latin-1")  # by which a pickler of protocol 2 has bytes as text
_REBUILT = frozenset(f"torch._utils._rebuild_{kind}" for kind in ("tensor_v2", "tensor_v3", "parameter"))
_CALLED = _REBUILT | {
    "_codecs.encode",
    "builtins.bytearray",
    "builtins.complex",
    "builtins.set",
    "collections.Counter",
    "collections.OrderedDict",
    "torch.Size",
    "torch._tensor._rebuild_from_type_v2",
    "torch._utils._rebuild_parameter_with_state",
    "torch.device",
    "torch.serialization._get_layout",
}
_OLD_BUILTINS = "__builtin__"  # as protocol 2 calls the module


def check_saved_values(data: bytes) -> None:
    """ValueError where ``data`` is no pickle of values, or would make more than it holds; StrangeName where it has
    names that no values need, or that are called in another way than torch.save has them called."""
    of_user = _names_of_user()
    known = {*_CALLED, *of_user, "torch.Tensor", "torch.nn.parameter.Parameter", *_constants()}
    _SavedValues(data, known, of_user).load()


class _SavedValues(Unpickler):
    """One pickle of values. Dicts and sets are lists of what is in them, since nothing is looked up there."""

    def __init__(self, data: bytes, known: set[str], of_user: set[str]) -> None:
        super().__init__(data, known)
        self._may_be_called = _CALLED | of_user
        self._of_user = of_user
        self._left = _MOST_COPIED * len(data)

    def find_class(self, module: str, name: str) -> Named:
        return super().find_class("builtins" if module == _OLD_BUILTINS else module, name)

    def _put(self, items: list[object]) -> None:
        into = self._popped()
        if type(into) is not list or len(items) % 2:
            self._refuse(f"it puts {len(items)} keys and values into a {type(into).__name__}")
        into += items
        self._stack.append(into)

    def _make(self) -> None:
        arguments, kind = self._popped(), self._popped()
        if type(kind) is not Named or type(arguments) is not tuple:
            self._refuse(f"it makes something of a {type(kind).__name__} with a {type(arguments).__name__}")
        if not self._is_as_saved(kind.name, arguments):
            raise StrangeName(kind.name)
        self._left -= sum(len(each) for each in arguments if isinstance(each, (str, bytes, list, tuple)))
        if self._left < 0:
            self._refuse("it has the same things copied again and again")
        is_dict = kind.name == "collections.OrderedDict" and not arguments
        self._put_down([] if is_dict else Made(kind.name, arguments))

    def _is_as_saved(self, name: str, arguments: tuple[object, ...]) -> bool:
        if name not in self._may_be_called:
            return False
        if name == "builtins.bytearray" and name not in self._of_user:
            return not any(type(each) in (int, bool) for each in arguments)
        if name == "_codecs.encode":
            return len(arguments) == 2 and arguments[1] in _LATIN
        if name == "torch._tensor._rebuild_from_type_v2":
            first = arguments[0] if arguments else None
            return type(first) is Named and first.name in _REBUILT
        return True

    def _build(self) -> None:
        self._popped()  # attributes, which nothing here looks at
        self._stack.append(self._popped())

    def _stored(self) -> None:
        place = self._popped()
        if type(place) is not tuple:
            self._refuse(f"it has a {type(place).__name__} for the place of a tensor's bytes")
        self._stack.append(Made("storage", place))


def _names_of_user() -> set[str]:
    """What the program has told torch to trust, and so means to have called."""
    found: list[Any] = torch.serialization.get_safe_globals()
    return {each[1] if isinstance(each, tuple) else f"{each.__module__}.{each.__qualname__}" for each in found}


def _constants() -> set[str]:
    """The names of dtypes and of kinds of storages."""
    dtypes = {str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return (
        dtypes
        | {f"torch.{name}" for name in vars(torch) if name.endswith("Storage")}
        | {
            "torch.storage.TypedStorage",
            "torch.storage.UntypedStorage",
        }
    )


_ADDED: Mapping[bytes, Callable[[_SavedValues], None]] = {
    b"Q": _SavedValues._stored,
    b"U": lambda self: self._bytes(1),
    b"\x8f": lambda self: self._stack.append([]),
    b"}": lambda self: self._stack.append([]),
    b"R": lambda self: self._make(),
    b"\x81": lambda self: self._make(),
    b"b": lambda self: self._build(),
}
_SavedValues.operations = {**Unpickler.operations, **{code[0]: each for code, each in _ADDED.items()}}
