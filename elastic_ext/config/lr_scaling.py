"""How a learning rate is scaled when the global batch changes, by ``StepOptions.learning_rate_rule``. Pure."""

from __future__ import annotations

import math
from typing import Literal, get_args

__all__ = ["LEARNING_RATE_RULES", "LearningRateRule", "rate_factor"]

LearningRateRule = Literal["none", "linear", "sqrt", "adascale"]
LEARNING_RATE_RULES: tuple[LearningRateRule, ...] = get_args(LearningRateRule)


def rate_factor(rule: LearningRateRule, reference_batch: int, batch: int, noise_scale: float | None = None) -> float:
    """The factor for a learning rate that was chosen for ``reference_batch`` samples per step, at ``batch`` samples.

    ``linear`` suits SGD, ``sqrt`` Adam and its kind; with ``none`` the rate is what the user says. ``adascale`` gives
    how many steps of the reference batch one step is worth, which lies between 1 and ``linear``; as long as
    ``noise_scale`` is not known it gives 1. While the global batch keeps its size every rule gives 1.

    ``noise_scale`` is the number of samples at which a step's gradient has as much noise as gradient.
    """
    if reference_batch < 1 or batch < 1:
        raise ValueError(f"batches are {reference_batch} and {batch} samples; allowed: at least 1")
    if rule == "none":
        return 1.0
    if rule == "linear":
        return batch / reference_batch
    if rule == "sqrt":
        return math.sqrt(batch / reference_batch)
    if rule == "adascale":
        if noise_scale is None:
            return 1.0
        # The gain of AdaScale: the mean square of a gradient of the reference batch over that of one of this batch. Of
        # n samples it is 1 + noise_scale / n times the square of the gradient without noise.
        return (noise_scale / reference_batch + 1.0) / (noise_scale / batch + 1.0)
    raise ValueError(f"learning_rate_rule is {rule!r}; allowed: {', '.join(LEARNING_RATE_RULES)}")
