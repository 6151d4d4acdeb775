"""Metadata of a saved state: which tensors there are, and which part of each lies in the file of which rank.

It stands as JSON beside the shard files and says nothing that changes from one save to the next, so that the same
state on the same ranks gives the same bytes, which are written once. A layout is written once for all tensors that
have it, as the places where the flattened tensor is cut and the order of the ranks that have what lies in between::

    {"format": 1,
     "num_ranks": 2,
     "orders": [[0, 1]],
     "layouts": [{"shape": [10, 3], "cuts": [0, 15, 30], "order": 0},
                 {"shape": [4, 4], "boxes": [[0, [0, 0], [4, 2]], [1, [0, 2], [4, 4]]]}],
     "tensors": {"a.weight": {"dtype": "F32", "kind": "parameter", "layout": 0}},
     "aliases": {"b.weight": "a.weight"}}

Here rank 0 has elements 0 to 14 of `a.weight`. Where a tensor is cut otherwise, `boxes` holds a rank, the start and
the end of each box: one number into the flattened tensor, or one per dimension. Ranks that have nothing are left out.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeAlias, TypeGuard, get_args

from elastic_ext.errors import CheckpointDamaged
from elastic_ext.fsdp.layout import Box, Boxes, Layout
from elastic_ext.records.json import shown

from .json_text import ITEM_BYTES, unknown_format
from .shardfile import check_name

__all__ = ["MOST_RANKS", "Kind", "StateMeta", "TensorMeta"]

Kind: TypeAlias = Literal["parameter", "buffer", "like", "scalar", "own", "opaque"]
"""What a saved tensor is. `parameter`, `buffer`: of a model. `like`: state of an optimizer, shaped like its parameter.
`scalar`: one number of an optimizer's. `own`: state of an optimizer with a shape and a layout of its own.
`opaque`: a whole tensor that one rank alone has, which its name tells."""

_FORMAT = 1
MOST_RANKS = 1 << 20
_MOST_DIMENSIONS = 256  # loops over the dimensions of a box nest this deep
_FEW_DIMENSIONS = f"at most {_MOST_DIMENSIONS} dimensions"
_LARGEST = (1 << 63) - 1
_KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A saved tensor: its layout says which part of it is in the file of each rank."""

    name: str
    dtype: str
    layout: Layout
    kind: Kind

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"the tensor {self.name!r} has dtype {self.dtype!r}; use one of {', '.join(ITEM_BYTES)}")
        if len(self.layout.shape) > _MOST_DIMENSIONS:
            raise ValueError(f"the tensor {self.name!r} has {len(self.layout.shape)}; allowed: {_FEW_DIMENSIONS}")
        if self.kind not in _KINDS:
            raise ValueError(f"the tensor {self.name!r} has kind {self.kind!r}; use one of {', '.join(_KINDS)}")


@dataclass(frozen=True, slots=True)
class StateMeta:
    """All tensors of a saved state by their names; ``aliases`` maps further names of tied tensors to these."""

    num_ranks: int
    tensors: Mapping[str, TensorMeta]
    aliases: Mapping[str, str]

    def __post_init__(self) -> None:
        if not 1 <= self.num_ranks <= MOST_RANKS:
            raise ValueError(f"num_ranks is {self.num_ranks}; use 1 to {MOST_RANKS}")
        for name, tensor in self.tensors.items():
            if name != tensor.name:
                raise ValueError(f"the tensor {tensor.name!r} stands under the name {name!r}; use its own")
            if len(tensor.layout.boxes) != self.num_ranks:
                raise ValueError(
                    f"the layout of {name!r} has {len(tensor.layout.boxes)} boxes; give one for each of "
                    f"{self.num_ranks} ranks, an empty one where a rank has nothing"
                )
        for alias, name in self.aliases.items():
            check_name(alias)
            if alias in self.tensors or name not in self.tensors:
                raise ValueError(f"{alias!r} stands for {name!r}; an alias is no tensor's name, and stands for one")

    def fault(self) -> str | None:
        """Which tensor's boxes do not hold each of its elements exactly once, and why; None if all do."""
        seen: set[int] = set()  # most tensors have a layout that others have too
        for name in sorted(self.tensors):
            layout = self.tensors[name].layout
            fault = None if id(layout) in seen else layout.fault()
            if fault is not None:
                return f"tensor {name!r}: {fault}"
            seen.add(id(layout))
        return None

    def to_json(self) -> bytes:
        """The metadata as it stands in a file; equal metadata gives equal bytes, whatever its empty boxes are."""
        writer = _Writer()
        names = sorted(self.tensors)
        numbers = [writer.number_of(self.tensors[name].layout) for name in names]
        tensors = (
            f"{json.dumps(name)}: "
            + _compact({"dtype": self.tensors[name].dtype, "kind": self.tensors[name].kind, "layout": number})
            for name, number in zip(names, numbers, strict=True)
        )
        aliases = (f"{json.dumps(alias)}: {json.dumps(self.aliases[alias])}" for alias in sorted(self.aliases))
        return (
            f'{{"format": {_FORMAT},\n"num_ranks": {self.num_ranks},\n'
            f'"orders": [{_lines(map(_compact, writer.orders))}],\n"layouts": [{_lines(writer.layouts)}],\n'
            f'"tensors": {{{_lines(tensors)}}},\n"aliases": {{{_lines(aliases)}}}}}\n'
        ).encode()

    @classmethod
    def from_json(cls, data: bytes, *, where: str = "the metadata") -> StateMeta:
        """The metadata that ``to_json`` gave; CheckpointError says what is wrong with ``where``, such as a file.

        Whether the boxes tile their tensors is another question: ``fault``.
        """
        try:
            value = json.loads(data.decode(), object_pairs_hook=_EachOnce(), parse_constant=_refuse_constant)
            _expect(isinstance(value, dict), "it", value, "one JSON object")
        except RecursionError:
            raise CheckpointDamaged(f"{where} is damaged: it nests too deeply") from None
        except ValueError as error:  # of JSON, of UTF-8, of one of the hooks
            raise CheckpointDamaged(f"{where} is damaged: {error}") from None
        if type(value.get("format")) is not int or value["format"] != _FORMAT:
            raise unknown_format(where, shown(value.get("format")), _FORMAT)
        try:
            return _read(value)
        except ValueError as error:
            raise CheckpointDamaged(f"{where} is damaged: {error}") from None


class _Writer:
    """Numbers the layouts and orders of metadata, so that each is written once."""

    def __init__(self) -> None:
        self.orders: dict[tuple[int, ...], int] = {}
        self.layouts: dict[str, int] = {}
        self._seen: dict[int, int] = {}  # which layout an object is, by its id

    def number_of(self, layout: Layout) -> int:
        number = self._seen.get(id(layout))
        if number is None:
            number = self.layouts.setdefault(_compact(self._said_of(layout)), len(self.layouts))
            self._seen[id(layout)] = number
        return number

    def _said_of(self, layout: Layout) -> dict[str, object]:
        held = [(box.start, box.end, rank) for rank, box in layout.held()]
        if all(len(start) == 1 for start, _, _ in held):
            held.sort()
        if not held or all(
            len(start) == 1 and end == following
            for (start, end, _), (following, _, _) in zip(held, [*held[1:], (held[-1][1], (), 0)], strict=True)
        ):
            cuts = [held[0][0][0] if held else 0, *(end[0] for _, end, _ in held)]
            order = self.orders.setdefault(tuple(rank for _, _, rank in held), len(self.orders))
            return {"shape": layout.shape, "cuts": cuts, "order": order}
        boxes = sorted((rank, start, end) for start, end, rank in held)
        return {"shape": layout.shape, "boxes": boxes}


def _lines(parts: Iterator[str] | Mapping[str, int]) -> str:
    return ",\n".join(parts)


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


# --- reading --------------------------------------------------------------------------------------------------------


def _read(value: dict[str, Any]) -> StateMeta:
    """The metadata that a JSON object holds; ValueError says what in it cannot be."""
    _expect_keys(value, ("format", "num_ranks", "orders", "layouts", "tensors", "aliases"), "it")
    num_ranks = value["num_ranks"]
    _expect(type(num_ranks) is int and 1 <= num_ranks <= MOST_RANKS, "num_ranks", num_ranks, f"1 to {MOST_RANKS}")
    for key, kind, words in (("orders", list, "a list"), ("layouts", list, "a list"), ("tensors", dict, "an object")):
        _expect(isinstance(value[key], kind), key, value[key], words)
    for number, order in enumerate(value["orders"]):
        if not _are_numbers(order) or len(set(order)) < len(order) or max(order, default=0) >= num_ranks:
            _refuse(f"order {number}", order, f"different ranks below {num_ranks}")
    layouts = [
        _layout(said, value["orders"], num_ranks, f"layout {number}") for number, said in enumerate(value["layouts"])
    ]
    tensors = {name: _tensor(name, said, layouts) for name, said in value["tensors"].items()}
    aliases = value["aliases"]
    if not isinstance(aliases, dict) or not all(isinstance(name, str) for name in aliases.values()):
        _refuse("aliases", aliases, "an object of names")
    return StateMeta(num_ranks=num_ranks, tensors=tensors, aliases=aliases)


def _tensor(name: str, said: object, layouts: Sequence[Layout]) -> TensorMeta:
    what = f"the tensor {shown(name)}"
    if not isinstance(said, dict):
        _refuse(what, said, "an object")
    _expect_keys(said, ("dtype", "kind", "layout"), what)
    dtype, kind, number = said["dtype"], said["kind"], said["layout"]
    _expect(isinstance(dtype, str) and dtype in ITEM_BYTES, f"the dtype of {what}", dtype, ", ".join(ITEM_BYTES))
    _expect(isinstance(kind, str) and kind in _KINDS, f"the kind of {what}", kind, ", ".join(_KINDS))
    _expect(
        type(number) is int and 0 <= number < len(layouts),
        f"the layout of {what}",
        number,
        f"the number of one of {len(layouts)} layouts",
    )
    return TensorMeta(name, dtype, layouts[number], kind)


def _layout(said: object, orders: Sequence[Sequence[int]], num_ranks: int, what: str) -> Layout:
    if not isinstance(said, dict):
        _refuse(what, said, "an object")
    by_cuts = "cuts" in said
    _expect_keys(said, ("shape", "cuts", "order") if by_cuts else ("shape", "boxes"), what)
    if not _are_numbers(said["shape"]):
        _refuse(f"the shape of {what}", said["shape"], "a list of sizes")
    _expect(len(said["shape"]) <= _MOST_DIMENSIONS, f"the shape of {what}", said["shape"], _FEW_DIMENSIONS)
    shape = tuple(said["shape"])
    size = 1
    for one in shape if 0 not in shape else (0,):
        size *= one
        _expect(size <= _LARGEST, f"the shape of {what}", shape, f"a product up to {_LARGEST}")
    held = (
        _by_cuts(shape, said["cuts"], said["order"], orders, what)
        if by_cuts
        else _by_boxes(shape, said["boxes"], num_ranks, what)
    )
    return Layout(shape, Boxes(shape, num_ranks, dict(sorted(held.items()))))  # as large as what was said of it


def _by_cuts(
    shape: tuple[int, ...], cuts: object, number: object, orders: Sequence[Sequence[int]], what: str
) -> dict[int, Box]:
    """The boxes of ranks in a layout given by cuts of the flattened tensor: what lies between each two, by rank."""
    size = math.prod(shape)
    if type(number) is not int or not 0 <= number < len(orders):
        _refuse(f"the order of {what}", number, f"the number of one of {len(orders)} orders")
    order = orders[number]
    if (
        not _are_numbers(cuts)
        or len(cuts) != len(order) + 1
        or cuts[-1] > size
        or not all(map(operator.lt, cuts, cuts[1:]))
    ):
        _refuse(f"cuts of {what}", cuts, f"{len(order) + 1} rising numbers from 0 to {size}")
    return {
        rank: Box(shape, (start,), (end,)) for rank, (start, end) in zip(order, itertools.pairwise(cuts), strict=True)
    }


def _by_boxes(shape: tuple[int, ...], said: object, num_ranks: int, what: str) -> dict[int, Box]:
    """The boxes of ranks in a layout that names each box, by rank."""
    if not isinstance(said, list):
        _refuse(f"boxes of {what}", said, "a list")
    held: dict[int, Box] = {}
    for one in said:
        if not isinstance(one, list) or len(one) != 3 or not all(_are_numbers(corner) for corner in one[1:]):
            _refuse(f"a box of {what}", one, "[rank, start, end], start and end being lists of numbers")
        rank, start, end = one
        if type(rank) is not int or not 0 <= rank < num_ranks or rank in held:
            _refuse(f"the rank of a box of {what}", rank, f"each rank below {num_ranks} once")
        box = Box(shape, tuple(start), tuple(end))
        fault = box.fault()
        if fault is not None or box.is_empty:
            raise ValueError(f"the box of rank {rank} in {what}: {fault or 'it is empty, and should be left out'}")
        held[rank] = box
    return held


def _are_numbers(value: object) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and {*map(type, value)} <= {int}
        and (not value or min(value) >= 0)
        and (not value or max(value) <= _LARGEST)
    )


class _EachOnce:
    """Makes the objects of JSON: refuses a key that comes twice, and has equal small ones share one object."""

    def __init__(self) -> None:
        self._seen: dict[tuple[object, ...], dict[str, object]] = {}

    def __call__(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        is_of_tensor = len(pairs) == 3 and all(type(value) in (str, int) for _, value in pairs)
        if is_of_tensor and (seen := self._seen.get(tuple(pairs))) is not None:
            return seen
        result = dict(pairs)
        if len(result) < len(pairs):
            twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            raise ValueError(f"the key {shown(twice)} appears twice")
        if is_of_tensor:
            self._seen[tuple(pairs)] = result
        return result


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}, which is no JSON")


def _expect_keys(said: Mapping[str, object], keys: Sequence[str], what: str) -> None:
    if set(said) != set(keys):
        _refuse(f"{what} has the keys", sorted(said), ", ".join(keys), verb="")


def _expect(right: bool, what: str, given: object, allowed: str) -> None:
    if not right:
        _refuse(what, given, allowed)


def _refuse(what: str, given: object, allowed: str, *, verb: str = " is") -> NoReturn:
    raise ValueError(f"{what}{verb} {shown(given)}; allowed: {allowed}")
