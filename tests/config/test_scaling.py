"""The factor by which a rate follows a global batch that changes."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ext.config.lr_scaling import LEARNING_RATE_RULES, LearningRateRule, rate_factor

RULES: tuple[LearningRateRule, ...] = get_args(LearningRateRule)
batches = st.integers(1, 2**40)
rules = st.sampled_from(RULES)
noise_scales = st.none() | st.floats(0.0, 2.0**40)


@pytest.mark.parametrize(
    ("rule", "reference", "batch", "factor"),
    [
        ("none", 8, 64, 1.0),
        ("none", 64, 8, 1.0),
        ("linear", 8, 64, 8.0),
        ("linear", 64, 8, 0.125),
        ("linear", 3, 7, 7 / 3),
        ("sqrt", 4, 64, 4.0),
        ("sqrt", 64, 4, 0.25),
        ("sqrt", 1, 2, math.sqrt(2.0)),
    ],
)
def test_factors(rule: LearningRateRule, reference: int, batch: int, factor: float) -> None:
    assert rate_factor(rule, reference, batch) == factor


def test_the_rules_are_those_of_the_table() -> None:
    assert RULES == LEARNING_RATE_RULES == ("none", "linear", "sqrt", "adascale")


@pytest.mark.parametrize(
    ("noise_scale", "reference", "batch", "factor"),
    [
        (None, 8, 64, 1.0),  # as long as it is not known
        (0.0, 8, 64, 1.0),  # more samples tell nothing more
        (64.0, 8, 64, 4.5),
        (8.0, 8, 16, 4 / 3),
        (8.0, 16, 8, 0.75),
    ],
)
def test_factors_by_the_noise_of_gradients(
    noise_scale: float | None, reference: int, batch: int, factor: float
) -> None:
    assert rate_factor("adascale", reference, batch, noise_scale) == pytest.approx(factor, rel=1e-15)


@given(noise_scales, batches, batches)
def test_by_the_noise_of_gradients_a_factor_lies_between_1_and_linear(
    noise_scale: float | None, reference: int, batch: int
) -> None:
    factor, linear = rate_factor("adascale", reference, batch, noise_scale), rate_factor("linear", reference, batch)
    assert min(1.0, linear) * (1 - 1e-12) <= factor <= max(1.0, linear) * (1 + 1e-12)


@given(rules, batches, noise_scales)
def test_a_batch_that_keeps_its_size_changes_not_a_bit(
    rule: LearningRateRule, batch: int, noise_scale: float | None
) -> None:
    assert rate_factor(rule, batch, batch, noise_scale) == 1.0


@given(rules, batches, batches, noise_scales)
def test_a_larger_batch_never_has_a_smaller_rate(
    rule: LearningRateRule, reference: int, batch: int, noise_scale: float | None
) -> None:
    factor = rate_factor(rule, reference, batch, noise_scale)
    assert 0.0 < factor < math.inf
    assert (factor >= 1.0) if batch >= reference else (factor <= 1.0)


@given(rules, batches, batches, batches, noise_scales)
def test_two_changes_make_the_factor_of_both_together(
    rule: LearningRateRule, first: int, second: int, third: int, noise_scale: float | None
) -> None:
    together = rate_factor(rule, first, second, noise_scale) * rate_factor(rule, second, third, noise_scale)
    assert together == pytest.approx(rate_factor(rule, first, third, noise_scale), rel=1e-12)


@given(batches, batches)
def test_the_square_of_sqrt_is_linear(reference: int, batch: int) -> None:
    assert rate_factor("sqrt", reference, batch) ** 2 == pytest.approx(rate_factor("linear", reference, batch))


@given(rules, st.integers(-5, 0), batches)
def test_batches_without_samples_are_refused(rule: LearningRateRule, empty: int, batch: int) -> None:
    for reference, other in ((empty, batch), (batch, empty)):
        with pytest.raises(ValueError, match=rf"batches are {reference} and {other} samples; allowed: at least 1"):
            rate_factor(rule, reference, other)


@pytest.mark.parametrize("rule", ["cubic", "Linear", "", None])
def test_an_unknown_rule_is_refused_with_those_that_there_are(rule: Any) -> None:
    with pytest.raises(ValueError, match=r"learning_rate_rule is .*; allowed: none, linear, sqrt, adascale"):
        rate_factor(rule, 1, 2)
