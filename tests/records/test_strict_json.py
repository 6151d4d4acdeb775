"""What bytes are JSON that a config can hold, before anyone asks what they say."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ext.errors import ConfigError
from elastic_ext.records.json import MAX_BYTES, MAX_DEPTH, can_be_written, read_object, read_value, shown
from tests.support.configs import unhurried

REFUSED = {
    "nothing at all": (b"", "empty"),
    "only white space": (b" \n\t ", "empty"),
    "only a byte order mark": (b"\xef\xbb\xbf", "empty"),
    "UTF-16": ('{"version": 1}'.encode("utf-16"), "not UTF-8"),
    "a Latin-1 letter": (b'{"version": 1, "reason": "gr\xfc\xdfe"}', "not UTF-8"),
    "an overlong UTF-8 form": (b'{"version": 1, "reason": "\xc0\xaf"}', "not UTF-8"),
    "a surrogate in UTF-8": (b'{"version": 1, "reason": "\xed\xa0\x80"}', "not UTF-8"),
    "half an escaped pair": (rb'{"version": 1, "reason": "\ud800"}', "half a character"),
    "half a pair in a key": (rb'{"version": 1, "user": {"\udfff": 1}}', "half a character"),
    "half a pair in a list": (rb'{"version": 1, "user": {"a": [["\ud83d"]]}}', "half a character"),
    "zero bytes": (b"\0" * 64, "not JSON"),
    "a control character in text": (b'{"reason": "a\nb"}', "not JSON"),
    "a comment": (b'{"version": 1} // first', "not JSON"),
    "a trailing comma": (b'{"version": 1,}', "line 1, column"),
    "two objects": (b'{"version": 1}{"version": 2}', "not JSON"),
    "half an object": (b'{"version": 1, "dataloader": {"batch_', "not JSON"),
    "a leading zero": (b'{"version": 01}', "not JSON"),
    "a hexadecimal number": (b'{"version": 0x1}', "not JSON"),
    "NaN": (b'{"version": 1, "user": {"a": NaN}}', "NaN"),
    "infinity": (b'{"version": 1, "user": {"a": Infinity}}', "Infinity"),
    "minus infinity": (b'{"version": 1, "user": {"a": [-Infinity]}}', "-Infinity"),
    "a number too large for a float": (b'{"version": 1, "user": {"a": 1e999}}', "1e999, which is infinite"),
    "a negative one": (b'{"version": 1, "user": {"a": -1E+999}}', "infinite"),
    "a long integer": (b'{"version": 1' + b"0" * 30 + b"}", "31 digits"),
    "a very long integer": (b'{"version": -' + b"9" * 500_000 + b"}", "500001 digits"),
    "a list": (b"[1]", "the config is [1]"),
    "a number": (b"7", "the config is 7"),
    "null": (b"null", "the config is null"),
    "text": (b'"version"', 'the config is "version"'),
    "a key twice": (b'{"version": 1, "version": 1}', '"version" appears twice'),
    "a key twice, once escaped": (rb'{"version": 1, "v\u0065rsion": 2}', '"version" appears twice'),
    "a key twice in a section": (b'{"version": 1, "optimizer": {"a": 1, "b": 2, "a": 3}}', '"a" appears twice'),
    "a key twice in the user's": (b'{"version": 1, "user": {"x": 1, "x": 1}}', '"x" appears twice'),
    "a key twice in the knobs": (b'{"tuning": {"knobs": {"k": [1], "k": [1]}}}', '"k" appears twice'),
    "a key twice where nobody looks": (b'{"a": [{"b": {"c": 1, "c": 1}}]}', '"c" appears twice'),
    "a huge file": (b'{"version": 1}' + b" " * MAX_BYTES, "at most 1048576 (1 MiB)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_config_can_be_is_refused_with_the_reason(case: str) -> None:
    data, words = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        read_object(data)
    assert words in str(caught.value)
    assert "allowed: " in str(caught.value)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("opening", "closing"),
    [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]"), ('{"version":1,"user":{"a":[', "]}}")],
)
def test_nesting_of_any_depth_is_refused_and_never_overflows(opening: str, closing: str) -> None:
    for depth in [*range(10, 1100, 7), 100_000]:
        whole = f"{opening * depth}1{closing * depth}".encode()
        for data in (whole, whole[: len(whole) // 2], b'{"version":' + whole + b"}"):
            with pytest.raises(ConfigError):
                read_object(data)


def test_eight_levels_are_read_and_nine_are_refused() -> None:
    def nested(num_lists: int) -> bytes:
        return b'{"a":' + b"[" * num_lists + b"]" * num_lists + b"}"

    assert read_object(nested(MAX_DEPTH - 1))
    with pytest.raises(ConfigError, match="at most 8 levels"):
        read_object(nested(MAX_DEPTH))


def test_a_file_of_exactly_one_mebibyte_is_read() -> None:
    start, end = b'{"user": {"a": "', b'"}}'
    data = start + b"x" * (MAX_BYTES - len(start) - len(end)) + end
    assert len(data) == MAX_BYTES
    assert read_object(data)
    with pytest.raises(ConfigError, match="1048577 bytes"):
        read_object(data + b"\n")


def test_a_byte_order_mark_before_an_object_is_passed_over() -> None:
    assert read_object(b'\xef\xbb\xbf{"version": 1}') == {"version": 1}


def test_a_whole_pair_of_surrogates_is_one_character() -> None:
    assert read_object(rb'{"a": "\ud83d\ude00"}') == {"a": "\N{GRINNING FACE}"}


@pytest.mark.parametrize("text", ["9223372036854775807", "-9223372036854775808", "0", "-0", "1e308", "5e-324"])
def test_numbers_of_64_bits_are_read(text: str) -> None:
    assert read_value(text) == json.loads(text)


def test_a_number_with_a_million_decimals_is_read_as_the_nearest_float() -> None:
    assert read_object(b'{"a": 0.' + b"3" * 1_000_000 + b"}") == {"a": 1 / 3}


@pytest.mark.parametrize(
    "text", ['"\\ud800"', '["\\ud800"]', "NaN", "1e999", "9" * 5000, "[" * 100_000, '{"a":1,"a":1}']
)
def test_a_single_value_is_refused_for_the_same_reasons(text: str) -> None:
    with pytest.raises(ConfigError):
        read_value(text)


@unhurried
@given(st.binary(max_size=200))
def test_bytes_are_an_object_or_refused(data: bytes) -> None:
    try:
        value = read_object(data)
    except ConfigError:
        return
    assert isinstance(value, dict)


@unhurried
@given(st.text(max_size=50))
def test_only_text_with_a_form_in_utf8_can_be_written(text: str) -> None:
    assert can_be_written(text) == all(not 0xD800 <= ord(character) <= 0xDFFF for character in text)


@settings(deadline=None, max_examples=40)
@given(
    st.recursive(st.none() | st.floats() | st.text() | st.binary() | st.sets(st.integers()), st.lists),
    st.integers(10, 90),
)
def test_whatever_is_shown_is_short_and_stays_on_one_line(value: object, limit: int) -> None:
    text = shown(value, limit)
    assert len(text) <= limit
    assert text.isascii() and text.isprintable()


def test_values_that_nest_without_end_can_be_shown() -> None:
    endless: list[object] = []
    endless.append(endless)
    deep: object = 1
    for _ in range(100_000):
        deep = [deep]
    assert shown(endless) == "[[...]]"
    assert shown(deep) == "a value that nests too deeply"
