"""Pickles of torch.distributed.checkpoint folders, read or checked without running any of what they name."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

__all__ = ["Made", "PickledName", "StrangeName", "Unpickler", "check_saved_values"]


# --- a pickle read without running any of it: what it names and makes are stand-ins, which do nothing ----------------
# Python's own unpickler calls what a pickle names, with arguments of the pickle's choice, and sets attributes of it.
# Even where it is given nothing to call, ten bytes have it take gigabytes for notes that are never made, and a nest of
# tuples as a key ends the process. This one has the operations alone that a pickler writes for data and plain objects,
# in protocols 2 to 5, and nothing to call with: whoever knows the kind of pickle turns stand-ins into values
# afterwards.

_NEWEST_PROTOCOL = 5
_MOST_NESTED = 1000
"""How deep tuples and objects may nest: comparing them as keys of a dict goes into all levels at once."""
_ORDERED = "collections.OrderedDict"


class StrangeName(ValueError):
    """A pickle names a class, function or constant, ``name``, that its kind of pickle has no need of."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"it names {name}")


@dataclass(frozen=True, slots=True, eq=False)
class PickledName:
    """Stands for a class, a function or a constant that a pickle names, which is not looked up."""

    name: str
    """The dotted name, with its module's."""


@dataclass(slots=True, eq=False)
class Made:
    """Stands for an object of a pickle: the name of what would make it, with which arguments and state."""

    name: str
    arguments: tuple[object, ...]
    state: object = None


class Unpickler:
    """Reads one pickle and runs none of it. ValueError where it is none, or has what no pickler writes for data.

    What ``load`` makes takes memory in proportion to ``data``, but is not flat: the same object may stand in many
    places, and lists may hold themselves, so whoever goes through it keeps to the shape that is expected.
    """

    operations: Mapping[int, Callable[[Any], None]]
    """The method for each operation code of a pickle, but for STOP."""

    def __init__(self, data: bytes, known: Collection[str]) -> None:
        """``known`` are the dotted names that the pickle may have; StrangeName is raised for any other."""
        self._data = data
        self._at = 0
        self._known = {name: PickledName(name) for name in known}
        self._notes: list[object] = []
        self._stack: list[object] = []
        self._marks: list[int] = []
        """The length of the stack at each mark."""
        self._levels: dict[int, tuple[int, object]] = {}
        """By the id of a tuple or object that holds others: how deep it nests, and itself, so that the id stays."""

    def load(self) -> object:
        """What the pickle holds: None, numbers, text, bytes, tuples, lists, dicts, PickledName and Made."""
        data, operations = self._data, self.operations
        while True:
            if self._at >= len(data):
                self._refuse("it is cut off")
            code = data[self._at]
            self._at += 1
            if code == _STOP:
                break
            operation = operations.get(code)
            if operation is None:
                self._refuse(f"it has the pickle operation {bytes([code])!r}, which plain data does not need")
            operation(self)
        if self._at != len(data):
            self._refuse(f"it ends {len(data) - self._at} bytes before the file does")
        value = self._popped()
        if self._stack or self._marks:
            self._refuse("its stack is not empty at its end")
        return value

    def find_class(self, module: str, name: str) -> PickledName:
        """The stand-in for a name in the pickle; StrangeName where the name is not among those known."""
        found = self._known.get(f"{module}.{name}")
        if found is None:
            raise StrangeName(f"{module}.{name}")
        return found

    # ---- what is read ----

    def _take(self, num_bytes: int) -> bytes:
        taken = self._data[self._at : self._at + num_bytes]
        if len(taken) != num_bytes:
            self._refuse("it is cut off")
        self._at += num_bytes
        return taken

    def _number(self, num_bytes: int) -> int:
        return int.from_bytes(self._take(num_bytes), "little")

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at)
        if end < 0:
            self._refuse("it is cut off")
        line = self._take(end - self._at)
        self._at += 1
        return line.decode()

    def _popped(self) -> object:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            self._refuse("it pops more than its stack holds")
        return self._stack.pop()

    def _since_mark(self) -> list[object]:
        if not self._marks:
            self._refuse("it pops more than its stack holds")
        mark = self._marks.pop()
        taken = self._stack[mark:]
        del self._stack[mark:]
        return taken

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(f"{what}, at byte {self._at}")

    # ---- operations ----

    def _protocol(self) -> None:
        protocol = self._number(1)
        if protocol > _NEWEST_PROTOCOL:
            self._refuse(f"it is of protocol {protocol}; allowed: up to {_NEWEST_PROTOCOL}")

    def _frame(self) -> None:
        self._take(8)  # how much to read ahead, which makes no difference to what there is

    def _mark(self) -> None:
        self._marks.append(len(self._stack))

    def _integer(self, format_: str) -> None:
        (number,) = struct.unpack(format_, self._take(struct.calcsize(format_)))
        self._stack.append(number)

    def _long(self, num_bytes: int) -> None:
        self._stack.append(int.from_bytes(self._take(self._number(num_bytes)), "little", signed=True))

    def _text(self, num_bytes: int) -> None:
        self._stack.append(self._take(self._number(num_bytes)).decode("utf-8", "surrogatepass"))

    def _bytes(self, num_bytes: int) -> None:
        self._stack.append(self._take(self._number(num_bytes)))

    def _tuple(self, num_items: int) -> None:
        items = [self._popped() for _ in range(num_items)]
        self._put_down(tuple(items[::-1]))

    def _tuple_since_mark(self) -> None:
        self._put_down(tuple(self._since_mark()))

    def _put_down(self, made: object) -> None:
        items = made.arguments if type(made) is Made else made if type(made) is tuple else ()
        if any(type(each) is tuple or type(each) is Made for each in items):
            inner = (self._levels[id(each)][0] if id(each) in self._levels else 1 for each in items)
            level = 1 + max(inner)
            if level > _MOST_NESTED:
                self._refuse(f"it nests more than {_MOST_NESTED} levels deep")
            self._levels[id(made)] = level, made
        self._stack.append(made)

    def _append(self, items: list[object]) -> None:
        into = self._popped()
        if type(into) is not list:
            self._refuse(f"it appends to a {type(into).__name__}")
        into += items
        self._stack.append(into)

    def _put(self, items: list[object]) -> None:
        into = self._popped()
        if type(into) is not dict or len(items) % 2:
            self._refuse(f"it puts {len(items)} keys and values into a {type(into).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str and type(key) is not Made:  # such keys are compared in no time
                self._refuse(f"it has a {type(key).__name__} as a key")
            into[key] = value
        self._stack.append(into)

    def _note(self, number: int) -> None:
        """Keep the value on top of the stack as memo ``number``; numbers rise one by one, as a pickler's do."""
        value = self._popped()
        self._stack.append(value)
        if number > len(self._notes):
            self._refuse(f"its memo has {len(self._notes)} entries, and it puts the next one at number {number}")
        self._notes[number : number + 1] = [value]

    def _get(self, number: int) -> None:
        if number >= len(self._notes):
            self._refuse(f"its memo has {len(self._notes)} entries, and it asks for number {number}")
        self._stack.append(self._notes[number])

    def _name(self) -> None:
        module = self._line()
        self._stack.append(self.find_class(module, self._line()))

    def _name_from_stack(self) -> None:
        name, module = self._popped(), self._popped()
        if type(name) is not str or type(module) is not str:
            self._refuse("it names something by what is no text")
        self._stack.append(self.find_class(module, name))

    def _make(self) -> None:
        arguments, kind = self._popped(), self._popped()
        if type(kind) is not PickledName or type(arguments) is not tuple:
            self._refuse(f"it makes something of a {type(kind).__name__} with a {type(arguments).__name__}")
        is_dict = kind.name == _ORDERED and not arguments
        self._put_down({} if is_dict else Made(kind.name, arguments))

    def _build(self) -> None:
        state, made = self._popped(), self._popped()
        if type(made) is not Made or made.state is not None:
            self._refuse(f"it gives a {type(made).__name__} a state that it cannot have, or another")
        made.state = state
        self._stack.append(made)


def _operations() -> Mapping[int, Callable[[Unpickler], None]]:
    put: Mapping[bytes, Callable[[Unpickler], None]] = {
        b"\x80": Unpickler._protocol,
        b"\x95": Unpickler._frame,
        b"(": Unpickler._mark,
        b"N": lambda self: self._stack.append(None),
        b"\x88": lambda self: self._stack.append(True),
        b"\x89": lambda self: self._stack.append(False),
        b"K": lambda self: self._stack.append(self._number(1)),
        b"M": lambda self: self._stack.append(self._number(2)),
        b"J": lambda self: self._integer("<i"),
        b"G": lambda self: self._integer(">d"),
        b"\x8a": lambda self: self._long(1),
        b"\x8b": lambda self: self._long(4),
        b"\x8c": lambda self: self._text(1),
        b"X": lambda self: self._text(4),
        b"\x8d": lambda self: self._text(8),
        b"C": lambda self: self._bytes(1),
        b"B": lambda self: self._bytes(4),
        b"\x8e": lambda self: self._bytes(8),
        b")": lambda self: self._tuple(0),
        b"\x85": lambda self: self._tuple(1),
        b"\x86": lambda self: self._tuple(2),
        b"\x87": lambda self: self._tuple(3),
        b"t": Unpickler._tuple_since_mark,
        b"]": lambda self: self._stack.append([]),
        b"a": lambda self: self._append([self._popped()]),
        b"e": lambda self: self._append(self._since_mark()),
        b"}": lambda self: self._stack.append({}),
        b"s": lambda self: self._put([self._popped(), self._popped()][::-1]),
        b"u": lambda self: self._put(self._since_mark()),
        b"\x94": lambda self: self._note(len(self._notes)),
        b"q": lambda self: self._note(self._number(1)),
        b"r": lambda self: self._note(self._number(4)),
        b"h": lambda self: self._get(self._number(1)),
        b"j": lambda self: self._get(self._number(4)),
        b"c": Unpickler._name,
        b"\x93": Unpickler._name_from_stack,
        b"R": Unpickler._make,
        b"\x81": Unpickler._make,
        b"b": Unpickler._build,
    }
    return {code[0]: operation for code, operation in put.items()}


_STOP = ord(".")
Unpickler.operations = _operations()


# --- what a pickle of torch.save would have torch make, found out before torch makes it ------------------------------
# What a pickle of torch.save would have torch make, found out before torch makes it: nothing larger than the pickle.
#
# torch's ``weights_only`` calls the few names that it trusts, with arguments of the pickle's choice: a ``bytearray`` of
# a number is that large, a tensor's class makes one of any size, and tuples in tuples as a key end the process. Here
# the same operations are gone through with stand-ins, and torch is given what passes.

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
    """Checks one pickle that torch.save has written; dicts and sets become lists of what is in them."""

    def __init__(self, data: bytes, known: set[str], of_user: set[str]) -> None:
        super().__init__(data, known)
        self._may_be_called = _CALLED | of_user
        self._of_user = of_user
        self._left = _MOST_COPIED * len(data)

    def find_class(self, module: str, name: str) -> PickledName:
        return super().find_class("builtins" if module == _OLD_BUILTINS else module, name)

    def _put(self, items: list[object]) -> None:
        into = self._popped()
        if type(into) is not list or len(items) % 2:
            self._refuse(f"it puts {len(items)} keys and values into a {type(into).__name__}")
        into += items
        self._stack.append(into)

    def _make(self) -> None:
        arguments, kind = self._popped(), self._popped()
        if type(kind) is not PickledName or type(arguments) is not tuple:
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
            return type(first) is PickledName and first.name in _REBUILT
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
    """The names that the program has told torch to trust, which loading may call."""
    found: list[Any] = torch.serialization.get_safe_globals()
    return {each[1] if isinstance(each, tuple) else f"{each.__module__}.{each.__qualname__}" for each in found}


def _constants() -> set[str]:
    """The names of torch's dtypes and storage classes."""
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
