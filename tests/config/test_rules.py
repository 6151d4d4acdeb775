"""What single values may be, where the table of keys alone does not show it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ext.config.keys import (
    KEYS,
    BlocksOrWhole,
    Bounds,
    Integer,
    KnobBoundsRule,
    Number,
    OneOf,
    Text,
    UserValueRule,
    nearest,
)
from tests.support.configs import KNOB_VALUES, LARGEST, unhurried, user_values

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
RULES = [key.rule for key in KEYS.values()] + [UserValueRule(), Bounds(Integer(1))]


@unhurried
@given(anything, st.sampled_from(RULES))
def test_a_rule_gives_a_value_or_says_what_it_allows(value: object, rule: Integer) -> None:
    try:
        kept = rule.check(value)
    except ValueError:
        return
    assert rule.check(kept) == kept


@unhurried
@given(user_values)
def test_user_values_are_kept_as_they_are_with_tuples_for_lists(value: object) -> None:
    assert UserValueRule().check(value) == value
    assert UserValueRule().check([value]) == (value,)


def nested(num_lists: int) -> object:
    value: object = 1
    for _ in range(num_lists):
        value = [value]
    return value


@pytest.mark.parametrize("num_lists", [7, 400, 5000, 100_000])
def test_lists_that_no_file_could_hold_are_refused(num_lists: int) -> None:
    with pytest.raises(ValueError, match="at most 6 deep"):
        UserValueRule().check(nested(num_lists))


def test_lists_six_deep_are_kept() -> None:
    assert UserValueRule().check(nested(6)) == ((((((1,),),),),),)


def test_a_list_that_holds_itself_is_refused() -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(ValueError, match="at most 6 deep"):
        UserValueRule().check(endless)


@pytest.mark.parametrize(
    "value", [2**53, -(2**53), 10**400, math.nan, math.inf, -math.inf, "\ud800", ["\udc00"], {"a": 1}, b"a", {1}, [{}]]
)
def test_user_values_that_would_not_survive_a_file_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"finite|at most|scalar|surrogates"):
        UserValueRule().check(value)


@pytest.mark.parametrize("value", [LARGEST, -LARGEST, 0, -0.0, 1e308, "", None, True, (), [[], []]])
def test_user_values_at_the_edge_are_kept(value: object) -> None:
    UserValueRule().check(value)


@pytest.mark.parametrize(
    ("given_bounds", "kept"),
    [
        ([1, 64], (1, 64)),
        ([5, 5], (5, 5)),
        ([8], (8,)),
        ([8, 2, 4], (8, 2, 4)),
        ((1, 2), (1, 2)),
    ],
)
def test_bounds_are_a_range_or_choices(given_bounds: object, kept: tuple[int, ...]) -> None:
    assert Bounds(Integer(1)).check(given_bounds) == kept


@pytest.mark.parametrize(
    "bounds", [[], [0, 4], [1, True], [1.0, 2.0], ["1"], [[1, 2]], 3, "12", None, {"min": 1}, [None]]
)
def test_bounds_of_anything_that_the_knob_could_not_be_are_refused(bounds: object) -> None:
    with pytest.raises(
        ValueError, match=r"\[min, max\] \(two numbers are always that\) or a list of choices, each an integer >= 1"
    ):
        Bounds(Integer(1)).check(bounds)


def test_a_range_with_the_larger_number_first_is_refused() -> None:
    with pytest.raises(ValueError, match="the smaller number first"):
        Bounds(Number(above=0.0)).check([0.1, 0.01])


def test_two_choices_that_are_no_numbers_are_no_range() -> None:
    assert Bounds(OneOf(("b", "a"))).check(["b", "a"]) == ("b", "a")
    assert Bounds(BlocksOrWhole()).check(["whole", 2]) == ("whole", 2)


def test_knobs_name_every_fault_and_the_nearest_known_knob() -> None:
    rule = KnobBoundsRule({"dataloader.batch_size": Integer(1), "parallelism.prefetch": Integer(0)})
    with pytest.raises(ValueError, match="tunable keys that `elastic-ext config schema` lists; ") as caught:
        rule.check({"dataloader.batch_sise": [1, 2], "parallelism.prefetch": [2, 1], "dataloader.batch_size": [0, 1]})
    text = str(caught.value)
    assert '"dataloader.batch_sise" is not one, the nearest is "dataloader.batch_size"' in text
    assert 'for "parallelism.prefetch" [min, max]' in text
    assert 'for "dataloader.batch_size" [min, max]' in text


def test_knobs_with_names_made_to_steer_a_terminal_are_shown_harmless() -> None:
    with pytest.raises(ValueError, match="tunable keys that `elastic-ext config schema` lists; ") as caught:
        KnobBoundsRule({"a": Integer(1)}).check({"\x1b[2J\n": [1, 2]})
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("path", KNOB_VALUES)
def test_every_knob_of_the_table_can_be_given_bounds(path: str) -> None:
    rule = KEYS["tuning.knobs"].rule
    value = {"parallelism.strategy": "no_shard", "dataloader.pin_memory": True}.get(path, 1)
    assert rule.check({path: [value]}) == {path: (value,)}


@pytest.mark.parametrize(
    "path", ["checkpoint.steps", "tuning.mode", "tuning.knobs", "version", "user.mixup", "apply_at_step"]
)
def test_what_is_not_for_tuning_is_no_knob(path: str) -> None:
    with pytest.raises(ValueError, match="is not one, the nearest is"):
        KEYS["tuning.knobs"].rule.check({path: [1, 2]})


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("batch_size", "dataloader.batch_size"),
        ("lr", "optimizer.learning_rate"),
        ("learning_rate", "optimizer.learning_rate"),
        ("dataloader.batchsize", "dataloader.batch_size"),
        ("global_batchsize", "global_batch_size"),
        ("optimiser.weight_decay", "optimizer.weight_decay"),
        ("Version", "version"),
        ("checkpoint.step", "checkpoint.steps"),
    ],
)
def test_the_nearest_key_is_the_one_a_reader_would_name(name: str, found: str) -> None:
    assert nearest(name, KEYS) == found


@unhurried
@given(st.text())
def test_some_key_is_nearest_to_any_text(name: str) -> None:
    assert nearest(name, KEYS) in KEYS


def test_text_is_counted_in_characters() -> None:
    assert Text(3).check("\N{GRINNING FACE}" * 3)
    with pytest.raises(ValueError, match="at most 3 characters"):
        Text(3).check("abcd")
    with pytest.raises(ValueError, match="unpaired surrogates"):
        Text(3).check("\ud800")


@pytest.mark.parametrize("value", [10**400, -(10**400), math.nan, math.inf, True, "1", None, [1]])
def test_numbers_that_are_none_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="a number >= 0"):
        Number(at_least=0.0).check(value)
