"""The JSON Schema of a config file says what ``ElasticConfig`` does, to a validator that is not ours: jsonschema."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ext import ConfigError, ElasticConfig
from elastic_ext.cli import main
from elastic_ext.config.keys import KEYS, SECTIONS
from elastic_ext.config.schema import json_schema
from tests.support.configs import LARGEST, VALUES, configs, user_names, user_values

SCHEMA = json_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)

TRIED: list[object] = [
    *(-1, 0, 1, 2, 3, 64, 1024, 1025, LARGEST, LARGEST + 1),
    *(-1e-9, 1e-300, 0.25, 0.5, 0.500001, 0.99, 1.5, 2.0**20 + 0.5),
    *(True, False, None, "", "1", "whole", "torch", "off", "auto", "no_shard", "full_shard", "x" * 2000, "x" * 2001),
    *([], [1], [1, 2], ["a"], [None], {}, {"steps": 1}),
    *({"dataloader.batch_size": [1, 2]}, {"dataloader.batch_size": []}, {"dataloader.batch_size": 1}),
    *({"dataloader.batch_size": [0, 4]}, {"batch_size": [1, 2]}, {"parallelism.prefetch": ["torch", 1]}),
]
LOOSER = [
    {"version": 1.0},
    {"version": 1, "dataloader": {"batch_size": 2.0}},
    {"version": 1, "tuning": {"knobs": {"dataloader.batch_size": [4, 2]}}},
    {"version": 1, "parallelism": {"strategy": "no_shard", "shard_degree": 2}},
    {"version": 1, "user": {"far": LARGEST + 1}},
    {"version": 1, "user": {"inner": [{}]}},
]
"""What the schema lets through and a job refuses: JSON Schema has no words for it, or none that an editor shows."""


def is_taken(file: object) -> bool:
    try:
        ElasticConfig.parse(json.dumps(file).encode())
    except ConfigError:
        return False
    return True


def with_value(path: str, value: object) -> dict[str, Any]:
    section, dot, name = path.rpartition(".")
    return {"version": 1, **({section: {name: value}} if dot else {name: value})}


def test_it_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@given(configs())
def test_every_config_that_is_one_passes(config: ElasticConfig) -> None:
    VALIDATOR.validate(json.loads(config.to_json()))


@pytest.mark.parametrize("path", KEYS)
def test_a_value_of_a_key_passes_where_a_job_takes_it(path: str) -> None:
    seen = {(is_taken(file), VALIDATOR.is_valid(file)) for file in (with_value(path, value) for value in TRIED)}
    assert seen == {(True, True), (False, False)}  # some are taken, some are not, and both agree on each


@given(user_names | st.text(max_size=3), user_values | st.dictionaries(st.text(), st.none(), max_size=1))
def test_a_name_of_the_users_own_passes_where_a_job_takes_it(name: str, value: object) -> None:
    file = {"version": 1, "user": {name: value}}
    assert VALIDATOR.is_valid(json.loads(json.dumps(file))) is is_taken(file)


@pytest.mark.parametrize("path", ["dataloader.batch_sise", "optimizer.lr", "batch_size", "checkpoint.now.", "tuning.x"])
def test_a_key_that_there_is_not_fails(path: str) -> None:
    assert not VALIDATOR.is_valid(with_value(path, 1))


@pytest.mark.parametrize("file", [{}, [], 1, {"reason": "x"}, {"version": 1, "checkpoint": {"steps": 1, "epochs": 1}}])
def test_what_is_no_config_fails(file: object) -> None:
    assert not VALIDATOR.is_valid(file)
    assert not is_taken(file)


@pytest.mark.parametrize("section", ["dataloader", "optimizer"])
def test_the_version_that_dlrover_writes_into_a_section_passes(section: str) -> None:
    file = {"version": 1, section: {"version": 3}}
    assert VALIDATOR.is_valid(file)
    assert is_taken(file)


@pytest.mark.parametrize("file", LOOSER, ids=str)
def test_what_it_cannot_say_passes_and_is_refused_by_the_job(file: object) -> None:
    assert VALIDATOR.is_valid(file)
    assert not is_taken(file)


def test_each_key_has_words_that_an_editor_shows() -> None:
    described = SCHEMA["properties"]
    assert {*SECTIONS, "version", "reason", "apply_at_step"} == set(described)
    for path in VALUES:
        section, dot, name = path.rpartition(".")
        entry = described[section]["properties"][name] if dot else described[name]
        assert KEYS[path].meaning in entry["description"]


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA
