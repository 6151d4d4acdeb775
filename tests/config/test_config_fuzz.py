"""Hostile config files, each written and each seen by a watching thread, which must not mind."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.config.keys import KEYS
from elastic_ext.config.watcher import ConfigWatcher
from elastic_ext.errors import ConfigError
from elastic_ext.records.files import write_whole
from tests.support.configs import configs

VALID_EVERY = 100
DEADLINE_SECONDS = 30.0
NEVER_SECONDS = 1000.0

FULL = b"""{"version": 7, "reason": "because", "apply_at_step": 100, "global_batch_size": 512,
 "dataloader": {"version": 1, "batch_size": 4, "num_workers": 2, "prefetch_factor": 2, "pin_memory": false},
 "optimizer": {"learning_rate": 0.001, "weight_decay": 0.1},
 "parallelism": {"strategy": "full_shard", "shard_degree": 2, "unit": "whole", "activation_checkpoint": 0.5},
 "communication": {"bucket_cap_mb": 25}, "checkpoint": {"steps": 100, "now": true},
 "tuning": {"mode": "advise", "knobs": {"dataloader.batch_size": [1, 64]}, "headroom": 0.1, "probe_steps": 20},
 "user": {"mixup": 0.2, "names": ["a", ["b", null]], "text": "gr\xc3\xbc\xc3\x9fe \xf0\x9f\x98\x80"}}
"""
HOSTILE_JSON = [
    b"null", b"[]", b"{}", b"0", b'""', b"true", b"-", b"NaN", b"1e999", b"-Infinity", b"0.1e-99999",
    b'{"a":', b"[" * 2000, b'{"a":' * 2000, b"1" * 400, b"1" * 20_000, b'{"version":1}', b'"version":8,', b'"user":{}',
    b'"user":{"x":{}}', b'"\\ud800"', b'"\\u0000"', b"\\", b'"', b"\x00", b"\xff\xfe", b"\xef\xbb\xbf",
    b"\xe2\x80\xae", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"/*", b"<!--", b"${HOME}", b"%s%n", b"'; DROP TABLE",
    b"__proto__", b"9007199254740993", b"\r", b"\x1b[2J", b" " * 5000,
]  # fmt: skip


def bit_flips(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8, 64])):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def truncation(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def beginning_cut_off(rng: random.Random, data: bytes) -> bytes:
    return data[rng.randrange(len(data)) :]


def splice(rng: random.Random, data: bytes) -> bytes:
    one, other = rng.randrange(len(data)), rng.randrange(len(data))
    return data[:one] + data[other:]


def piece_repeated(rng: random.Random, data: bytes) -> bytes:
    start = rng.randrange(len(data))
    end = min(len(data), start + rng.randrange(1, 60))
    return data[:end] + data[start:end] * rng.choice([1, 2, 50]) + data[end:]


def hostile_insertion(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + rng.choice(HOSTILE_JSON) + data[at + rng.choice([0, 0, 1, 5]) :]


def hostile_value(rng: random.Random, data: bytes) -> bytes:
    """Sound JSON around one value that is not."""
    colons = [index for index, byte in enumerate(data) if byte == ord(":")]
    at = rng.choice(colons) + 1
    end = min((index for mark in b",}" if (index := data.find(mark, at)) >= 0), default=len(data))
    return data[:at] + rng.choice(HOSTILE_JSON) + data[end:]


def duplicated_key(rng: random.Random, data: bytes) -> bytes:
    raw = json.loads(data)
    name = rng.choice(sorted(raw))
    return json.dumps(raw)[:-1].encode() + f', "{name}": {json.dumps(raw[name])}}}'.encode()


def random_bytes(rng: random.Random, data: bytes) -> bytes:
    return rng.randbytes(rng.choice([0, 1, 2, 16, 500, 5000]))


def deep_nesting(rng: random.Random, data: bytes) -> bytes:
    depth = rng.choice([9, 50, 990, 1000, 10_000, 100_000])
    opening = rng.choice([b"[", b'{"a":', b'{"user":{"x":['])
    return b'{"version":8,"user":{"x":' + opening * depth + rng.choice([b"", b"1"]) + b"]" * rng.choice([0, depth])


def other_encoding(rng: random.Random, data: bytes) -> bytes:
    return data.decode().encode(rng.choice(["utf-16", "utf-32", "utf-8-sig", "utf-7", "cp500"]), errors="replace")


def many_keys(rng: random.Random, data: bytes) -> bytes:
    return json.dumps({"version": 8, **{f"{rng.random()}": 1 for _ in range(rng.choice([10, 300]))}}).encode()


def huge(rng: random.Random, data: bytes) -> bytes:
    return data + rng.choice([b" ", b"\0", b"x"]) * rng.choice([1 << 20, (1 << 20) - len(data)])


def oversized_value(rng: random.Random, data: bytes) -> bytes:
    name = rng.choice(["reason", "version", "apply_at_step", "user", "tuning"])
    return json.dumps(
        {**json.loads(data), name: rng.choice(["x" * 5000, 10**18, 1e300, -1, [[[]]], {"a": "b" * 9000}])}
    ).encode()


COMMON: list[Callable[[random.Random, bytes], bytes]] = [
    bit_flips, truncation, beginning_cut_off, splice, piece_repeated, hostile_insertion, hostile_value, hostile_value,
    duplicated_key, random_bytes, other_encoding, oversized_value,
]  # fmt: skip
RARE: list[Callable[[random.Random, bytes], bytes]] = [deep_nesting, many_keys, huge]


def hostile_file(rng: random.Random) -> bytes:
    data = rng.choice(RARE if rng.random() < 0.02 else COMMON)(rng, FULL)
    while data and rng.random() < 0.2:
        data = rng.choice([bit_flips, truncation, splice, hostile_insertion])(rng, data)
    return data


def parsed(data: bytes) -> ElasticConfig | None:
    try:
        return ElasticConfig.parse(data)
    except ConfigError:
        return None


def write_torn(path: Path, data: bytes, rng: random.Random) -> None:
    """In place, in pieces, as an editor without care would."""
    with open(path, "wb", buffering=0) as file:
        written = 0
        while written < len(data):
            end = rng.randrange(written, len(data)) + 1
            file.write(data[written:end])
            written = end


def is_valid_at_no_moment(data: bytes) -> bool:
    """Whether no beginning of it is a valid file, so that tearing it changes nothing."""
    ends = [index + 1 for index, byte in enumerate(data) if byte == ord("}")]
    return all(parsed(data[:end]) is None for end in ends[:50]) and len(ends) <= 50


@pytest.mark.parametrize("num_files", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_hostile_files_leave_the_old_config_in_place_and_the_thread_alive(tmp_path: Path, num_files: int) -> None:
    rng = random.Random(20_240_613)
    path = tmp_path / "config.json"
    version = 1000
    expected = ElasticConfig(version=version)
    write_whole(path, expected.to_json().encode(), durable=False)
    num_valid = num_torn = 0
    with ConfigWatcher(path, poll_seconds=NEVER_SECONDS) as watcher:
        for number in range(num_files):
            data = hostile_file(rng)
            config = parsed(data)
            if config is not None:
                num_valid += 1
                expected = config
            if config is None and data and rng.random() < 0.2 and is_valid_at_no_moment(data):
                num_torn += 1
                write_torn(path, data, rng)
            else:
                write_whole(path, data, durable=False)
            assert watcher.wait_until_seen(data, DEADLINE_SECONDS), f"file {number} was never seen: {data[:200]!r}"
            held = watcher.newest
            assert held is not None and held.digest == expected.digest, f"file {number}: {data[:200]!r}"
            assert (watcher.refusal is None) == (config is not None)
            if number % VALID_EVERY == VALID_EVERY - 1:
                version += 1
                expected = ElasticConfig(version=version)
                valid = expected.to_json().encode()
                write_whole(path, valid, durable=False)
                assert watcher.wait_until_seen(valid, DEADLINE_SECONDS)
                assert watcher.newest == expected and watcher.is_alive
    assert num_torn > num_files // 20
    assert num_valid < num_files // 3  # most of them are hostile indeed


def test_files_torn_in_place_end_in_what_was_written_last(tmp_path: Path) -> None:
    rng = random.Random(3)
    path = tmp_path / "config.json"
    with ConfigWatcher(path, poll_seconds=0.005, use_events=False) as watcher:
        for version in range(1, 101):
            data = ElasticConfig(version=version, user={"x": "y" * rng.randrange(50)}).to_json().encode()
            write_torn(path, truncation(rng, data), rng)
            write_torn(path, data, rng)
            assert watcher.wait_until_seen(data, DEADLINE_SECONDS)
            assert watcher.newest is not None and watcher.newest.version == version


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_are_a_config_or_a_config_error(data: bytes) -> None:
    parsed(data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
section_names = st.sampled_from(sorted({name for key in KEYS for name in key.split(".")} | {"user"}))
documents = st.dictionaries(
    section_names, json_values | st.dictionaries(section_names, json_values, max_size=4), max_size=6
)


@settings(max_examples=60, deadline=None)
@given(documents)
def test_any_object_is_a_config_that_reads_back_or_a_config_error(document: dict[str, object]) -> None:
    for raw in (document, {"version": 1, **document}):
        config = parsed(json.dumps(raw).encode(errors="surrogatepass"))
        if config is not None:
            assert parsed(config.to_json().encode()) == config


@settings(max_examples=100, deadline=None)
@given(configs(), st.data())
def test_a_valid_file_with_one_byte_changed_is_a_config_or_a_config_error(
    config: ElasticConfig, data: st.DataObject
) -> None:
    text = bytearray(config.to_json().encode())
    text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    changed = parsed(bytes(text))
    if changed is not None:
        assert parsed(changed.to_json().encode()) == changed
