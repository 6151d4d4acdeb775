"""Knobs: what a script reads by name, and the types that it can rely on."""

from __future__ import annotations

import pytest

from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.config.follower import UserKnobs
from elastic_ext.errors import ConfigError


def config(**user: object) -> ElasticConfig:
    return ElasticConfig.from_values({f"user.{name}": value for name, value in user.items()}, version=1)


@pytest.mark.parametrize(
    ("default", "value"),
    [
        (0.1, 0.2),
        (1, 2),
        (True, False),
        ("cosine", "linear"),
        ([1, 2], (3,)),
        ((), ("a",)),
        (None, 3),
        (None, "text"),
        (None, (1,)),
    ],
)
def test_a_value_of_the_type_of_the_default_is_read(default: object, value: object) -> None:
    read = UserKnobs().read(config(x=value), "x", default)
    assert read == value and type(read) is type(value)


def test_a_whole_number_where_the_script_starts_with_a_fraction_is_read_as_a_float() -> None:
    read = UserKnobs().read(config(x=2), "x", 0.5)
    assert read == 2.0 and type(read) is float


@pytest.mark.parametrize(
    ("default", "value", "allowed"),
    [
        (1, 1.5, "an integer"),
        (1, 2.0, "an integer"),
        (1, True, "an integer"),
        (0.5, True, "a number"),
        (0.5, "0.5", "a number"),
        (True, 1, "true or false"),
        (False, "false", "true or false"),
        ("a", 1, "text"),
        ("a", ("a",), "text"),
        ([1], 1, "a list"),
        ((1,), "1", "a list"),
    ],
)
def test_a_value_of_another_type_is_refused_by_the_check_and_by_the_reading(
    default: object, value: object, allowed: str
) -> None:
    knobs = UserKnobs()
    assert knobs.read(config(), "x", default) is default
    reason = knobs.check(config(x=value))
    assert reason is not None and reason.startswith("user.x is ") and f"allowed: {allowed}" in reason
    assert "the script starts with" in reason
    with pytest.raises(ConfigError, match=f"allowed: {allowed}"):
        knobs.read(config(x=value), "x", default)


def test_every_knob_of_an_unfit_type_is_named() -> None:
    knobs = UserKnobs()
    knobs.read(config(), "x", 1)
    knobs.read(config(), "y", "a")
    knobs.read(config(), "z", 0.5)
    reason = knobs.check(config(x="a", y=1, z=1))
    assert reason is not None
    assert "user.x" in reason and "user.y" in reason and "user.z" not in reason


@pytest.mark.parametrize("given", [config(), config(x=None), config(y=1), ElasticConfig(version=1)])
def test_what_is_absent_or_null_means_the_default(given: ElasticConfig) -> None:
    knobs = UserKnobs()
    assert knobs.read(given, "x", 0.1) == 0.1
    assert knobs.read(given, "x", None) is None
    assert knobs.check(given) is None


def test_a_dotted_key_of_the_table_is_read_and_never_refused() -> None:
    knobs = UserKnobs()
    new = ElasticConfig.from_values({"optimizer.learning_rate": 0.5, "user.optimizer.learning_rate": "mine"}, version=1)
    assert knobs.read(new, "optimizer.learning_rate", 0.1) == 0.5
    assert knobs.read(new, "dataloader.batch_size", 8) == 8
    assert knobs.check(new) is None
    assert knobs.was_read("optimizer.learning_rate") and not knobs.was_read("user.optimizer.learning_rate")


def test_a_name_with_a_dot_that_is_no_key_is_the_users_own() -> None:
    knobs = UserKnobs()
    assert knobs.read(ElasticConfig(version=1, user={"aug.mixup": 0.3}), "aug.mixup", 0.1) == 0.3
    assert knobs.was_read("user.aug.mixup") and not knobs.was_read("aug.mixup")


def test_names_that_were_not_read_may_be_anything() -> None:
    knobs = UserKnobs()
    knobs.read(config(), "x", 1)
    assert knobs.check(config(y="anything", z=(1, "a"))) is None
    assert not knobs.was_read("user.y")
    knobs.apply(config(), config(x=1))
