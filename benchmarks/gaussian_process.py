"""A Gaussian process over points, and expected improvement: what a search knows that knows nothing of jobs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.simulated_draw import STRATEGIES, Array
from elastic_ext.tuner.space import Point, Value

__all__ = ["chosen_by_improvement", "features_of"]

LENGTH = 0.45
NOISE = 0.005
"""The variance of what is measured, by that of what is to be found."""
_FROM_EACH_OTHER = 0.5
"""How far strategies are apart, along an axis of their own each."""


def features_of(points: Sequence[Point], choices: Mapping[str, Sequence[Value]]) -> Array:
    """Points as places: of each knob how far along its choices it is, from 0 to 1."""
    columns = []
    for name, values in choices.items():
        if name == "strategy" or len(values) < 2:
            continue
        place = {value: at / (len(values) - 1) for at, value in enumerate(values)}
        columns.append([place.get(getattr(point, name), 0.0) for point in points])
    for strategy in STRATEGIES:
        columns.append([_FROM_EACH_OTHER * (point.strategy == strategy) for point in points])
    found: Array = np.array(columns).T
    return found


def chosen_by_improvement(candidates: Array, tried: Array, logs: Array) -> tuple[int, float]:
    """The candidate that is expected to improve most on the least of ``logs``, and by how much."""
    middle, spread = float(logs.mean()), float(logs.std()) + 1e-6
    values = (logs - middle) / spread
    inverse = np.linalg.inv(_alike(tried, tried) + NOISE * np.eye(len(tried)))
    near = _alike(candidates, tried)
    mean = near @ inverse @ values
    deviation = np.sqrt(np.maximum(1 - np.einsum("ij,jk,ik->i", near, inverse, near), 1e-9))
    below = float(values.min()) - mean
    z = below / deviation
    chance = 0.5 * (1 + np.array([math.erf(each / math.sqrt(2)) for each in z]))
    improvement = spread * (below * chance + deviation * np.exp(-z * z / 2) / math.sqrt(2 * math.pi))
    at = int(np.argmax(improvement))
    return at, float(improvement[at])


def _alike(first: Array, second: Array) -> Array:
    apart = (first**2).sum(1)[:, None] + (second**2).sum(1)[None] - 2 * first @ second.T
    found: Array = np.exp(-np.maximum(apart, 0) / (2 * LENGTH**2))
    return found
