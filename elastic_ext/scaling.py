"""Learning-rate rules: by which factor a rate changes when the global batch does. Pure."""

from __future__ import annotations

import math
from typing import Literal

__all__ = ["BatchRule", "rate_factor"]

BatchRule = Literal["none", "linear", "sqrt"]


def rate_factor(rule: BatchRule, reference_batch: int, batch: int) -> float:
    """What to multiply a rate with that was chosen for ``reference_batch`` samples per step.

    ``linear`` suits SGD, ``sqrt`` Adam and its kind; with ``none`` the rate is what the user says. While the global
    batch keeps its size every rule gives 1.
    """
    if reference_batch < 1 or batch < 1:
        raise ValueError(f"batches are {reference_batch} and {batch} samples; allowed: at least 1")
    if rule == "none":
        return 1.0
    if rule == "linear":
        return batch / reference_batch
    if rule == "sqrt":
        return math.sqrt(batch / reference_batch)
    raise ValueError(f"the batch-size rule is {rule!r}; allowed: none, linear, sqrt")
