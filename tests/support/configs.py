"""Configs made up by hypothesis: valid values for every key of the table, alone and together."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import settings
from hypothesis import strategies as st

from elastic_ext.config.elastic_config import ElasticConfig

LARGEST = 2**53 - 1
unhurried = settings(deadline=None)  # the machines that run this are shared

texts = st.text(st.characters(codec="utf-8"), max_size=20)
user_scalars = (
    st.none()
    | st.booleans()
    | st.integers(-LARGEST, LARGEST)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
)
user_values = st.recursive(user_scalars, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5)
user_names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)

_counts = st.integers(1, LARGEST)
_above_zero = st.floats(0, exclude_min=True, allow_infinity=False, allow_nan=False)

KNOB_VALUES: Mapping[str, st.SearchStrategy[object]] = {
    "global_batch_size": _counts,
    "dataloader.batch_size": _counts,
    "dataloader.num_workers": st.integers(0, 1024),
    "dataloader.prefetch_factor": st.integers(1, 1024),
    "dataloader.pin_memory": st.booleans(),
    "optimizer.learning_rate": _above_zero,
    "optimizer.weight_decay": st.floats(0, allow_infinity=False, allow_nan=False),
    "parallelism.strategy": st.sampled_from(["no_shard", "shard_grad_op", "full_shard", "hybrid_shard"]),
    "parallelism.shard_degree": _counts,
    "parallelism.unit": _counts | st.just("whole"),
    "parallelism.activation_checkpoint": st.floats(0, 1),
    "parallelism.prefetch": st.integers(0, LARGEST) | st.just("torch"),
    "communication.bucket_cap_mb": st.floats(0, 2.0**20, exclude_min=True) | st.just("torch"),
}
VALUES: Mapping[str, st.SearchStrategy[object]] = {
    **KNOB_VALUES,
    "checkpoint.steps": _counts,
    "checkpoint.epochs": _counts,
    "checkpoint.now": st.booleans(),
    "tuning.mode": st.sampled_from(["off", "advise", "auto"]),
    "tuning.knobs": st.dictionaries(
        st.sampled_from(["dataloader.batch_size", "parallelism.prefetch"]),
        st.lists(_counts, min_size=1, max_size=4).map(lambda bounds: tuple(sorted(bounds))),
        max_size=2,
    ),
    "tuning.headroom": st.floats(0, 0.5),
    "tuning.memory_bytes": _counts,
    "tuning.probe_steps": _counts,
    "tuning.probe_budget": st.floats(0, 1),
    "tuning.goal": _above_zero,
}


@st.composite
def dotted_values(draw: st.DrawFn) -> dict[str, object]:
    """Some keys of the table and of the user, with values that are allowed together."""
    values: dict[str, object] = {
        path: draw(VALUES[path]) for path in draw(st.lists(st.sampled_from(sorted(VALUES)), unique=True, max_size=8))
    }
    if "checkpoint.steps" in values:
        values.pop("checkpoint.epochs", None)
    if values.get("parallelism.strategy") == "no_shard":
        values.pop("parallelism.shard_degree", None)
    user = draw(st.dictionaries(user_names, user_values, max_size=3))
    return {**values, **{f"user.{name}": value for name, value in user.items()}}


@st.composite
def configs(draw: st.DrawFn) -> ElasticConfig:
    """Whole configs as a file can hold them."""
    values = ElasticConfig.from_values(draw(dotted_values()), version=draw(_counts), reason=draw(texts)).to_dict()
    step = draw(st.none() | st.integers(0, LARGEST))
    return ElasticConfig.from_dict(values if step is None else {**values, "apply_at_step": step})
