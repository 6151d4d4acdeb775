"""Records as JSON has them: what was written is read back, and of anything else the field that is amiss is named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ext.records.json import JsonRecord, object_of, records_of
from tests.support.configs import unhurried


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    size: int
    note: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer(JsonRecord):
    number: float
    name: str
    state: Literal["on", "off"]
    rows: tuple[Inner, ...]
    sizes: tuple[int, ...]
    inner: Inner
    details: Mapping[str, object] = field(default_factory=dict)
    rate: float | None = None
    nested: Inner | None = None
    words: tuple[str, ...] | None = None


def read(text: str) -> Outer:
    return Outer.from_json(text)


texts = st.text(st.characters(codec="utf-8"))
inners = st.builds(Inner, size=st.integers(), note=st.none() | texts)
numbers = st.floats(allow_nan=False, allow_infinity=False)
outers = st.builds(
    Outer,
    number=numbers,
    name=texts,
    state=st.sampled_from(["on", "off"]),
    rows=st.lists(inners, max_size=3).map(tuple),
    sizes=st.lists(st.integers(), max_size=3).map(tuple),
    inner=inners,
    details=st.dictionaries(texts, st.none() | st.booleans() | st.integers() | texts, max_size=3),
    rate=st.none() | numbers,
    nested=st.none() | inners,
    words=st.none() | st.lists(texts, max_size=3).map(tuple),
)
RECORD = Outer(number=1.5, name="n", state="on", rows=(Inner(size=1),), sizes=(3, 4), inner=Inner(size=2, note="x"))


@given(record=outers)
@unhurried
def test_a_record_is_read_back_as_it_was_written(record: Outer) -> None:
    text = record.to_json()
    assert len(text.splitlines()) == 1 and json.loads(text) == json.loads(json.dumps(asdict(record)))
    assert read(text) == record and not hasattr(record, "__dict__")


def test_what_a_newer_version_has_added_is_left_out_and_what_has_a_default_may_be_missing() -> None:
    found = asdict(RECORD)
    del found["details"], found["rate"], found["rows"][0]["note"]
    assert read(json.dumps(found | {"added": [1]})) == RECORD


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"number": "1"}, 'number is "1"; allowed: float'),
        ({"number": True}, "number is true; allowed: float"),
        ({"number": float("nan")}, "number is NaN"),
        ({"number": float("inf")}, "number is Infinity"),
        ({"number": 10**400}, "number is 1000"),
        ({"number": None}, "number is null"),
        ({"rate": "fast"}, 'rate is "fast"; allowed: float | None'),
        ({"name": 7}, "name is 7; allowed: str"),
        ({"state": "of"}, 'state is "of"; allowed: Literal'),
        ({"state": ["on"]}, "state is"),
        ({"rows": {}}, "rows is no list of objects"),
        ({"rows": [1]}, "rows is no list of objects"),
        ({"rows": [{"size": 1}, {"size": 1.0}]}, r"rows\[1\].size is 1.0; allowed: int"),
        ({"rows": [{}]}, r"rows\[0\].size is missing"),
        ({"sizes": "34"}, "sizes is no list"),
        ({"sizes": [3, 4.0]}, r"sizes\[1\] is 4.0; allowed: tuple"),
        ({"inner": 3}, "inner is no object"),
        ({"inner": None}, "inner is no object"),
        ({"inner": {"size": True}}, "inner.size is true; allowed: int"),
        ({"nested": {"size": "1"}}, 'nested.size is "1"; allowed: int'),
        ({"nested": 3}, "nested is 3; allowed: Inner | None"),
        ({"words": ["a", 1]}, r"words\[1\] is 1; allowed: tuple"),
        ({"words": "a"}, 'words is "a"; allowed: tuple'),
        ({"details": [1]}, "details is"),
    ],
)
def test_a_value_that_a_field_cannot_have_is_named(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match="^" + words.replace("|", r"\|")):
        read(json.dumps(asdict(RECORD) | changed))


@pytest.mark.parametrize("name", ["number", "name", "state", "inner"])
def test_a_field_that_is_missing_is_named(name: str) -> None:
    found = asdict(RECORD)
    del found[name]
    with pytest.raises(ValueError, match=f"^{name} is missing"):
        read(json.dumps(found))


@pytest.mark.parametrize("text", ["", "{", "[]", "1", "null", '"x"', "[" * 100_000, "9" * 5000, '{"a": 1'])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        object_of(text)


def test_a_key_that_appears_twice_is_refused_where_each_may_appear_once() -> None:
    text = '{"a": {"b": 1, "b": 2}}'
    assert object_of(text) == {"a": {"b": 2}} and object_of('{"a": 1, "b": 1}', once_each=True) == {"a": 1, "b": 1}
    with pytest.raises(ValueError, match='the key "b" appears twice'):
        object_of(text, once_each=True)


def test_rows_are_read_as_records_and_the_row_that_is_amiss_is_named() -> None:
    assert records_of(Inner, [{"size": 1}, {"size": 2, "added": 0}]) == (Inner(size=1), Inner(size=2))
    assert records_of(Inner, []) == ()
    for rows, words in (({}, "rows is no list"), ([1], "rows is no list"), ([{"size": 1}, {}], r"rows\[1\].size is")):
        with pytest.raises(ValueError, match=words):
            records_of(Inner, rows)


@given(text=st.text())
@unhurried
def test_any_text_is_a_record_or_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        read(text)
