"""Metadata of saved states: what is written is read back, the same state gives the same bytes, nothing else is read."""

from __future__ import annotations

import copy
import json
import math
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ext.errors import CheckpointDamaged, CheckpointError
from elastic_ext.fsdp.checkpoint.format.json_text import ITEM_BYTES
from elastic_ext.fsdp.checkpoint.format.metadata import StateMeta, TensorMeta
from elastic_ext.fsdp.checkpoint.format.shardfile import CHECKSUMS
from elastic_ext.fsdp.layout import Box, Layout

KINDS = ("parameter", "buffer", "like", "scalar", "own", "opaque")


def spread(shape: Sequence[int], num_ranks: int) -> Layout:
    """A tensor cut as evenly as can be."""
    return Layout(tuple(shape), Box.whole(shape).split(num_ranks))


def columns(rows: int, sizes: Sequence[int]) -> Layout:
    """A matrix cut along its columns."""
    shape = (rows, sum(sizes))
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return Layout(shape, tuple(Box.block(shape, (0, at), (rows, at + n)) for at, n in zip(starts, sizes, strict=True)))


def state(*layouts: Layout, aliases: dict[str, str] | None = None, dtype: str = "F32") -> StateMeta:
    tensors = {f"w{i}": TensorMeta(f"w{i}", dtype, layout, "parameter") for i, layout in enumerate(layouts)}
    return StateMeta(len(layouts[0].boxes), tensors, aliases or {})


EXAMPLE = state(
    spread((10, 3), 2),
    Layout((4, 4), (Box.block((4, 4), (0, 0), (4, 2)), Box.block((4, 4), (0, 2), (4, 4)))),
    Layout((), (Box.empty(()), Box.whole(()))),
    aliases={"tied": "w0"},
)


@st.composite
def layouts(draw: st.DrawFn, num_ranks: int) -> Layout:
    """Any boxes of one tensor, tiling it or not."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    size = math.prod(shape)
    how = draw(st.sampled_from(["even", "turned", "flat", "blocks"]))
    if how in ("even", "turned"):
        boxes = list(Box.whole(shape).split(num_ranks))
        if how == "turned":
            boxes = draw(st.permutations(boxes))
        return Layout(shape, tuple(boxes))
    found = []
    for _ in range(num_ranks):
        if how == "flat" or not shape or draw(st.booleans()):
            start = draw(st.integers(0, size))
            box = Box.flat(shape, start, draw(st.integers(start, size)))
        else:
            corner = [draw(st.integers(0, n)) for n in shape]
            box = Box.block(shape, corner, [draw(st.integers(low, n)) for low, n in zip(corner, shape, strict=True)])
        found.append(Box.empty(shape) if box.is_empty else box)  # as metadata has it
    return Layout(shape, tuple(found))


@st.composite
def states(draw: st.DrawFn) -> StateMeta:
    num_ranks = draw(st.integers(1, 5))
    few = draw(st.lists(layouts(num_ranks), min_size=1, max_size=3))
    names = draw(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), unique=True, max_size=6))
    tensors = {
        name: TensorMeta(name, draw(st.sampled_from(list(ITEM_BYTES))), draw(st.sampled_from(few)), draw(kinds))
        for name in names[: len(names) // 2 + 1]
    }
    aliases = {alias: draw(st.sampled_from(sorted(tensors))) for alias in names[len(names) // 2 + 1 :] if tensors}
    return StateMeta(num_ranks, tensors, aliases)


kinds: st.SearchStrategy[Any] = st.sampled_from(KINDS)


def without_empty_boxes(meta: StateMeta) -> StateMeta:
    def tidy(layout: Layout) -> Layout:
        return Layout(layout.shape, tuple(Box.empty(layout.shape) if box.is_empty else box for box in layout.boxes))

    tensors = {n: TensorMeta(n, t.dtype, tidy(t.layout), t.kind) for n, t in meta.tensors.items()}
    return StateMeta(meta.num_ranks, tensors, meta.aliases)


# --- written and read -----------------------------------------------------------------------------------------------


@given(states())
@settings(max_examples=300, deadline=None)
def test_what_is_written_is_read_back(meta: StateMeta) -> None:
    data = meta.to_json()
    read = StateMeta.from_json(data)
    assert read == without_empty_boxes(meta)
    assert read.to_json() == data
    assert (read.fault() is None) == (meta.fault() is None)


@given(states(), st.randoms())
@settings(deadline=None)
def test_same_state_in_another_order_gives_the_same_bytes(meta: StateMeta, random: Any) -> None:
    names, aliases = list(meta.tensors), list(meta.aliases)
    random.shuffle(names)
    random.shuffle(aliases)
    again = StateMeta(
        meta.num_ranks,
        {name: copy.deepcopy(meta.tensors[name]) for name in names},  # no object in common, layouts neither
        {alias: meta.aliases[alias] for alias in aliases},
    )
    assert again.to_json() == meta.to_json()


def test_file_is_as_documented() -> None:
    assert json.loads(EXAMPLE.to_json()) == {
        "format": 1,
        "num_ranks": 2,
        "orders": [[0, 1], [1]],
        "layouts": [
            {"shape": [10, 3], "cuts": [0, 15, 30], "order": 0},
            {"shape": [4, 4], "boxes": [[0, [0, 0], [4, 2]], [1, [0, 2], [4, 4]]]},
            {"shape": [], "cuts": [0, 1], "order": 1},
        ],
        "tensors": {
            "w0": {"dtype": "F32", "kind": "parameter", "layout": 0},
            "w1": {"dtype": "F32", "kind": "parameter", "layout": 1},
            "w2": {"dtype": "F32", "kind": "parameter", "layout": 2},
        },
        "aliases": {"tied": "w0"},
    }


def test_file_has_a_line_for_each_tensor_and_each_layout() -> None:
    lines = EXAMPLE.to_json().decode().splitlines()
    assert '"w1": {"dtype":"F32","kind":"parameter","layout":1},' in lines
    assert len(lines) == 11


def test_state_without_tensors_is_a_state() -> None:
    meta = StateMeta(3, {}, {})
    assert StateMeta.from_json(meta.to_json()) == meta
    assert meta.fault() is None


def test_layout_that_many_tensors_have_is_written_once_and_read_as_one() -> None:
    meta = state(*[spread((4096, 4096), 8) for _ in range(500)])
    data = meta.to_json()
    assert data.count(b'"cuts"') == 1 and data.count(b"[0,1,2,3,4,5,6,7]") == 1
    assert len({id(tensor.layout) for tensor in StateMeta.from_json(data).tensors.values()}) == 1


def test_a_thousand_parameters_on_64_ranks_take_less_than_a_megabyte() -> None:
    different = state(*[spread((4000 + i, 4096), 64) for i in range(1000)])
    data = different.to_json()
    assert len(data) < 1_000_000
    assert StateMeta.from_json(data) == different
    assert different.fault() is None
    parts = Box.whole((9999,)).split(64)
    turned = state(*[Layout((9999,), (*parts[i % 64 :], *parts[: i % 64])) for i in range(1000)])
    assert len(turned.to_json()) < 1_000_000


# --- what cannot be -------------------------------------------------------------------------------------------------


def test_metadata_takes_memory_for_what_it_says_and_not_for_each_rank_that_there_may_be() -> None:
    layouts = [f'{{"shape":[{size}],"cuts":[0,{size}],"order":0}}' for size in range(1, 101)]
    tensors = [f'"{at}":{{"dtype":"F32","kind":"parameter","layout":{at}}}' for at in range(100)]
    data = (
        f'{{"format":1,"num_ranks":{1 << 20},"orders":[[7]],"layouts":[{",".join(layouts)}],'
        f'"tensors":{{{",".join(tensors)}}},"aliases":{{}}}}'
    ).encode()
    tracemalloc.start()
    try:
        meta = StateMeta.from_json(data)
        assert meta.fault() is None
        assert tracemalloc.get_traced_memory()[1] < 64 * len(data)
    finally:
        tracemalloc.stop()
    layout = meta.tensors["99"].layout
    assert len(layout.boxes) == 1 << 20 and list(layout.held()) == [(7, Box.whole((100,)))]
    assert layout.boxes[7] == Box.whole((100,)) and layout.boxes[-1] == Box.empty((100,))
    assert StateMeta.from_json(meta.to_json()) == meta


def test_fault_names_the_first_tensor_that_is_not_tiled() -> None:
    gap = Layout((10,), (Box.flat((10,), 0, 4), Box.flat((10,), 5, 10)))
    overlap = Layout((10,), (Box.flat((10,), 0, 6), Box.flat((10,), 5, 10)))
    assert state(spread((10,), 2), columns(3, [2, 5])).fault() is None
    assert state(spread((10,), 2), gap, overlap).fault() == f"tensor 'w1': {gap.fault()}"
    assert state(overlap, gap).fault() == f"tensor 'w0': {overlap.fault()}"
    assert StateMeta.from_json(state(gap).to_json()).fault() == f"tensor 'w0': {gap.fault()}"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TensorMeta("a", "F31", spread((2,), 1), "own"), "dtype 'F31'; use one of F64"),
        (lambda: TensorMeta("a", "F32", spread((2,), 1), "odd"), "kind 'odd'; use one of parameter"),  # type: ignore[arg-type]
        (lambda: TensorMeta(CHECKSUMS, "F32", spread((2,), 1), "own"), "needs for itself"),
        (lambda: TensorMeta("\udfff", "F32", spread((2,), 1), "own"), "half a character"),
        (lambda: StateMeta(0, {}, {}), "num_ranks is 0; use 1"),
        (lambda: StateMeta(2, EXAMPLE.tensors, {"w0": "w1"}), "'w0' stands for 'w1'; an alias is no tensor's name"),
        (lambda: StateMeta(2, EXAMPLE.tensors, {"a": "b"}), "'a' stands for 'b'"),
        (lambda: StateMeta(3, EXAMPLE.tensors, {}), "has 2 boxes; give one for each of 3 ranks"),
        (lambda: StateMeta(2, {"a": EXAMPLE.tensors["w0"]}, {}), "'w0' stands under the name 'a'"),
    ],
)
def test_metadata_that_cannot_be_is_refused_with_the_reason(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def changed(path: Sequence[str | int], value: object) -> bytes:
    """The example with something else in one place; nothing there if ``value`` is Ellipsis."""
    whole = json.loads(EXAMPLE.to_json())
    place = whole
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return json.dumps(whole).encode()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is damaged: Expecting value"),
        (b"\xff", "is damaged: 'utf-8' codec"),
        (b"[1]", r"it is \[1\]; allowed: one JSON object"),
        (b"[" * 100_000, "it nests too deeply"),
        (b'{"a": 1, "a": 2}', 'the key "a" appears twice'),
        (b'{"format": NaN}', "it holds NaN"),
        (b"9" * 5000, "is damaged: "),
        (changed(["format"], 2), "has format 2, and this elastic_ext reads formats up to 1: it is not damaged"),
        (changed(["format"], ...), "has format null"),
        (changed(["format"], True), "has format true"),
        (changed(["more"], 1), 'it has the keys .*"more"'),
        (changed(["aliases"], ...), "it has the keys"),
        (changed(["num_ranks"], 0), "num_ranks is 0; allowed: 1 to"),
        (changed(["num_ranks"], 10**15), "num_ranks is 1000000000000000; allowed"),
        (changed(["num_ranks"], 1), r"order 0 is \[0, 1\]; allowed: different ranks below 1"),
        (changed(["orders"], {}), "orders is {}; allowed: a list"),
        (changed(["orders", 0], [0, 0]), "order 0 is"),
        (changed(["orders", 0], [True, 0]), "order 0 is"),
        (changed(["tensors"], []), r"tensors is \[\]"),
        (changed(["layouts", 0], 3), "layout 0 is 3"),
        (changed(["layouts", 0, "shape"], [-1]), r"the shape of layout 0 is \[-1\]"),
        (changed(["layouts", 0, "shape"], [1 << 40, 1 << 40]), "the shape of layout 0 is"),
        (changed(["layouts", 0, "order"], 2), "the order of layout 0 is 2; allowed: the number of one of 2 orders"),
        (changed(["layouts", 0, "order"], True), "the order of layout 0 is true"),
        (changed(["layouts", 0, "cuts"], [0, 15]), "allowed: 3 rising numbers from 0 to 30"),
        (changed(["layouts", 0, "cuts"], [0, 15, 31]), "cuts of layout 0"),
        (changed(["layouts", 0, "cuts"], [0, 15, 15]), "cuts of layout 0"),
        (changed(["layouts", 0, "cuts"], [0, 1.0, 2]), "cuts of layout 0"),
        (changed(["layouts", 0, "boxes"], []), "layout 0 has the keys"),
        (changed(["layouts", 1, "boxes"], 0), "boxes of layout 1"),
        (changed(["layouts", 1, "boxes", 0], [0, [0, 0]]), "a box of layout 1"),
        (changed(["layouts", 1, "boxes", 0, 0], 1), "the rank of a box of layout 1 is 1"),
        (changed(["layouts", 1, "boxes", 0, 0], 2), "the rank of a box of layout 1 is 2"),
        (changed(["layouts", 1, "boxes", 0, 2], [4, 5]), "the box of rank 0 in layout 1: .*outside"),
        (changed(["layouts", 1, "boxes", 0, 2], [4]), "the box of rank 0 in layout 1"),
        (changed(["layouts", 1, "boxes", 0, 2], [0, 2]), "the box of rank 0 in layout 1: it is empty"),
        (changed(["tensors", "w0"], None), 'the tensor "w0" is null'),
        (changed(["tensors", "w0", "kind"], ...), 'the tensor "w0" has the keys'),
        (changed(["tensors", "w0", "dtype"], "f32"), 'the dtype of the tensor "w0" is "f32"; allowed: F64'),
        (changed(["tensors", "w0", "dtype"], []), 'the dtype of the tensor "w0"'),
        (changed(["tensors", "w0", "kind"], "new"), 'the kind of the tensor "w0" is "new"'),
        (changed(["tensors", "w0", "layout"], 3), 'the layout of the tensor "w0" is 3'),
        (changed(["tensors", "w0", "layout"], -1), 'the layout of the tensor "w0" is -1'),
        (changed(["tensors", CHECKSUMS], {"dtype": "F32", "kind": "own", "layout": 0}), "needs for itself"),
        (changed(["aliases", "tied"], "gone"), "'tied' stands for 'gone'"),
        (changed(["aliases", "tied"], 3), "aliases is"),
        (changed(["aliases", "w1"], "w0"), "'w1' stands for 'w0'"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(data: bytes, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        StateMeta.from_json(data, where="/a/model_meta.json")
    assert str(caught.value).startswith("/a/model_meta.json ")
    assert isinstance(caught.value, CheckpointDamaged) == ("format" not in words)


def test_changes_beside_this_example_are_told_from_the_example_itself() -> None:
    assert StateMeta.from_json(changed(["format"], 1)) == EXAMPLE


def read_or_refused(data: bytes) -> None:
    """Reads what may be metadata; whatever it is, nothing but a refusal may be raised."""
    try:
        meta = StateMeta.from_json(data)
    except CheckpointError:
        return
    assert StateMeta.from_json(meta.to_json()) == meta
    meta.fault()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 40) | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.data())
@settings(max_examples=500, deadline=None)
def test_no_value_in_any_place_is_more_than_a_refusal(data: st.DataObject) -> None:
    whole = json.loads(EXAMPLE.to_json())
    for _ in range(data.draw(st.integers(1, 2))):
        place: Any = {"": whole}
        key: Any = ""
        while isinstance(place[key], (dict, list)) and place[key] and data.draw(st.integers(0, 4)):
            place = place[key]
            key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        place[key] = data.draw(JSON)
        whole = whole if place is not None and key != "" else place[key]
    read_or_refused(json.dumps(whole).encode())


@given(st.integers(0, len(EXAMPLE.to_json()) - 1), st.binary(max_size=3), st.integers(0, 3))
@settings(max_examples=500)
def test_no_change_of_bytes_is_more_than_a_refusal(at: int, new: bytes, num_gone: int) -> None:
    data = EXAMPLE.to_json()
    read_or_refused(data[:at] + new + data[at + num_gone :])


@given(st.binary(max_size=100))
def test_no_bytes_at_all_are_more_than_a_refusal(data: bytes) -> None:
    read_or_refused(data)
