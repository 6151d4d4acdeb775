"""A JSON document gone through in little memory: what comes of it is what Python's own decoder makes of it."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elastic_ext.fsdp.checkpoint.format.json_text import JsonText, Long

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4), inner, max_size=6),
    max_leaves=30,
)
TEXTS = st.text(st.sampled_from('[]{},:"\\n10.-eE+ truefalsnx'), max_size=14)


def cut(text: bytes, num_bytes: int) -> Iterator[bytes]:
    return (text[at : at + num_bytes] for at in range(0, len(text), num_bytes))


@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=6), st.integers(1, 20), st.integers(1, 30), st.booleans())
def test_members_are_what_the_decoder_gives(value: dict[str, object], num_bytes: int, ahead: int, pretty: bool) -> None:
    text = json.dumps(value, indent=2 if pretty else None, ensure_ascii=pretty)
    pieces = list(cut(text.encode("utf-8", "surrogatepass"), num_bytes))
    assert dict(JsonText(pieces, ahead=ahead).members(lambda key: True)) == value
    for key, found in JsonText(pieces, ahead=ahead).members():
        if isinstance(found, Long):
            inner = value[key]
            assert isinstance(inner, dict | list) and found.beginning[0] == json.dumps(inner)[0]
            assert found.beginning in text and len(found.beginning) <= 200
        else:
            assert found == value[key]


@given(VALUES.map(json.dumps) | TEXTS, st.integers(1, 10), st.integers(1, 12))
@example("[1,]", 1, 1)
@example('{"a":1,}', 1, 1)
@example("[1 2]", 1, 1)
@example("12", 1, 1)
@example("[01]", 1, 1)
@example("", 1, 1)
def test_what_the_decoder_refuses_is_refused_and_nothing_else(text: str, num_bytes: int, ahead: int) -> None:
    try:
        json.loads(text)
    except ValueError:
        with pytest.raises(ValueError, match=r"character [0-9]+"):
            JsonText(cut(text.encode(), num_bytes), ahead=ahead).check()
    else:
        JsonText(cut(text.encode(), num_bytes), ahead=ahead).check()


@pytest.mark.parametrize("text", [b"[1]", b"", b"1", b'{"a": 1} 2', b'{"a" 1}', b'{"a": [1, 2}', b'{"a": "\xff"}'])
def test_what_is_no_object_has_no_members(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"character|decode"):
        list(JsonText([text], ahead=1).members())


def test_of_a_long_document_little_is_held() -> None:
    pieces = [b'{"a": [', *[b'[1.5, "one"], 2.25, {"b": null, "c": true}, ' * 10] * 500, b'0], "d": 1}']
    tracemalloc.start()
    try:
        found = dict(JsonText(pieces, ahead=1000).members())
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(found["a"], Long) and found["a"].beginning.startswith('[[1.5, "one"], 2.25') and found["d"] == 1
    assert peak_bytes < 50_000 < sum(map(len, pieces)) // 4
