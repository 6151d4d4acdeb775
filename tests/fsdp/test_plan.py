"""ParallelPlan: what it may say, and what follows from it for a number of ranks and of blocks."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.fsdp import ShardingStrategy

from elastic_ext import ParallelPlan
from elastic_ext.fsdp.layout import Box
from elastic_ext.fsdp.plan import Degrees, blocks_recomputed, parts_of, units_of_blocks
from elastic_ext.strategies import STRATEGIES


@pytest.mark.parametrize(
    ("named", "strategy"),
    [
        ("full_shard", "full_shard"),
        ("FULL_SHARD", "full_shard"),
        ("No_Shard", "no_shard"),
        (ShardingStrategy.NO_SHARD, "no_shard"),
        (ShardingStrategy.FULL_SHARD, "full_shard"),
        (ShardingStrategy.SHARD_GRAD_OP, "shard_grad_op"),
        (ShardingStrategy.HYBRID_SHARD, "hybrid_shard"),
    ],
)
def test_strategies_are_named_as_torch_names_them_in_either_case(named: Any, strategy: str) -> None:
    assert ParallelPlan(strategy=named).strategy == strategy


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"strategy": "ddp"},
            """strategy is 'ddp'; allowed: "no_shard" (DDP), "shard_grad_op" (ZeRO-2), "full_shard" (FSDP)""",
        ),
        ({"strategy": None}, 'strategy is None; allowed: "no_shard" (DDP),'),
        ({"strategy": ShardingStrategy._HYBRID_SHARD_ZERO2}, "strategy is <ShardingStrategy._HYBRID_SHARD_ZERO2"),
        ({"shard_degree": 0}, "shard_degree is 0; allowed: an integer >= 1"),
        ({"shard_degree": 2.0}, "shard_degree is 2.0; allowed: an integer >= 1"),
        ({"shard_degree": True}, "shard_degree is True; allowed: an integer >= 1"),
        ({"strategy": "no_shard", "shard_degree": 2}, "shard_degree is 2 with the strategy no_shard"),
        ({"unit": 0}, 'unit is 0; allowed: an integer >= 1 or "whole"'),
        ({"unit": "half"}, "unit is 'half'; allowed: an integer >= 1 or \"whole\""),
        ({"unit": None}, 'unit is None; allowed: an integer >= 1 or "whole"'),
        ({"activation_checkpoint": 1.5}, 'activation_checkpoint is 1.5; allowed: "none", "all", or a share of blocks'),
        ({"activation_checkpoint": -0.1}, "activation_checkpoint is -0.1; allowed"),
        ({"activation_checkpoint": math.nan}, "activation_checkpoint is nan; allowed"),
        ({"activation_checkpoint": "half"}, "activation_checkpoint is 'half'; allowed"),
        ({"activation_checkpoint": True}, "activation_checkpoint is True; allowed"),
        ({"prefetch": -1}, "prefetch is -1; allowed: an integer >= 0"),
        ({"prefetch": 1.0}, "prefetch is 1.0; allowed: an integer >= 0"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb is 0; allowed: a number above 0, up to 1048576, in MiB"),
        ({"bucket_cap_mb": math.inf}, "bucket_cap_mb is inf; allowed: a number above 0, up to 1048576, in MiB"),
        ({"bucket_cap_mb": math.nan}, "bucket_cap_mb is nan; allowed: a number above 0, up to 1048576, in MiB"),
        ({"bucket_cap_mb": 1e300}, "bucket_cap_mb is 1e+300; allowed: a number above 0, up to 1048576, in MiB"),
        ({"bucket_cap_mb": "25"}, "bucket_cap_mb is '25'; allowed: a number above 0, up to 1048576, in MiB"),
        ({"bucket_cap_mb": True}, "bucket_cap_mb is True; allowed: a number above 0, up to 1048576, in MiB"),
    ],
)
def test_what_no_plan_may_say_is_refused_with_what_is_allowed(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        ParallelPlan(**{"strategy": "full_shard", **fields})


@pytest.mark.parametrize(("share", "ratio"), [("none", 0.0), ("all", 1.0), (0, 0.0), (1, 1.0), (0.25, 0.25)])
def test_activation_checkpoint_is_a_share_whichever_way_it_was_given(share: Any, ratio: float) -> None:
    plan = ParallelPlan(strategy="full_shard", activation_checkpoint=share)
    assert plan.ratio == ratio
    assert plan == ParallelPlan(strategy="full_shard", activation_checkpoint=ratio)


def test_the_strategy_goes_without_its_name() -> None:
    assert ParallelPlan("full_shard") == ParallelPlan(strategy="full_shard")
    assert ParallelPlan("hybrid_shard", 2, 3) == ParallelPlan(strategy="hybrid_shard", shard_degree=2, unit=3)


def test_plans_are_values() -> None:
    assert ParallelPlan(strategy="full_shard") == ParallelPlan(strategy="FULL_SHARD")  # type: ignore[arg-type]
    assert len({ParallelPlan(strategy="full_shard"), ParallelPlan(strategy="full_shard", unit=1)}) == 1
    with pytest.raises(AttributeError):
        ParallelPlan(strategy="full_shard").unit = 2  # type: ignore[misc]


# --- degrees --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "shard_degree", "num_ranks", "num_local", "degrees"),
    [
        ("no_shard", None, 4, 2, (4, 1)),
        ("no_shard", 1, 4, 2, (4, 1)),
        ("full_shard", None, 6, 2, (1, 6)),
        ("shard_grad_op", None, 6, 2, (1, 6)),
        ("hybrid_shard", None, 8, 4, (2, 4)),
        ("hybrid_shard", None, 8, 1, (8, 1)),
        ("hybrid_shard", 2, 8, 4, (4, 2)),
        ("hybrid_shard", 1, 3, 3, (3, 1)),
        ("hybrid_shard", 3, 3, 1, (1, 3)),
        ("hybrid_shard", None, 1, 1, (1, 1)),
    ],
)
def test_ranks_are_shared_out_by_strategy_and_degree(
    strategy: Any, shard_degree: int | None, num_ranks: int, num_local: int, degrees: tuple[int, int]
) -> None:
    plan = ParallelPlan(strategy=strategy, shard_degree=shard_degree)
    found = plan.degrees(num_ranks, num_local)
    assert (found.replicate, found.shard) == degrees
    assert found.num_ranks == num_ranks


def test_the_numbers_of_ranks_that_a_plan_allows_are_the_multiples_of_one() -> None:
    for strategy, degree, num_local in itertools.product(STRATEGIES, (None, 1, 2, 3), (1, 2, 4)):
        if degree is None or strategy == "hybrid_shard":
            plan = ParallelPlan(strategy=strategy, shard_degree=degree)  # type: ignore[arg-type]
            allowed = [num_ranks for num_ranks in range(1, 13) if is_allowed(plan, num_ranks, num_local)]
            multiple = plan.rank_multiple(num_local)
            assert allowed == [*range(multiple, 13, multiple)], plan


def is_allowed(plan: ParallelPlan, num_ranks: int, num_local: int) -> bool:
    try:
        return plan.degrees(num_ranks, num_local).num_ranks == num_ranks
    except ValueError:
        return False


@pytest.mark.parametrize(
    ("shard_degree", "num_ranks", "num_local", "words"),
    [
        (3, 4, 4, "shard_degree: 3 does not divide the 4 ranks; allowed: 1, 2, 4"),
        (8, 6, 6, "shard_degree: 8 does not divide the 6 ranks; allowed: 1, 2, 3, 6"),
        (None, 7, 4, "the ranks of a machine: 4 does not divide the 7 ranks; allowed: 1, 7"),
    ],
)
def test_degrees_that_do_not_divide_the_ranks_are_refused(
    shard_degree: int | None, num_ranks: int, num_local: int, words: str
) -> None:
    plan = ParallelPlan(strategy="hybrid_shard", shard_degree=shard_degree)
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        plan.degrees(num_ranks, num_local)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_degree_of_a_strategy_that_shards_over_all_ranks_is_their_number_or_refused(strategy: Any) -> None:
    assert ParallelPlan(strategy=strategy, shard_degree=4).degrees(4, 4) == Degrees(1, 4)
    with pytest.raises(ValueError, match=r"shard_degree.* 2 "):
        ParallelPlan(strategy=strategy, shard_degree=2).degrees(4, 4)


@given(st.integers(1, 4), st.integers(1, 5), st.lists(st.integers(0, 7), min_size=1, max_size=3))
def test_layout_is_as_many_copies_cut_as_chunk_cuts(replicate: int, shard: int, shape: list[int]) -> None:
    layout = Degrees(replicate, shard).layout(tuple(shape))
    assert len(layout.boxes) == replicate * shard
    chunks = [len(chunk) for chunk in torch.empty(shape).chunk(shard)]
    chunks += [0] * (shard - len(chunks))
    across = math.prod(shape[1:])
    assert [box.num_elements for box in layout.boxes] == [rows * across for rows in chunks] * replicate
    assert parts_of(tuple(shape), 0, 1) == (Box.block(tuple(shape), [0] * len(shape), shape),)


# --- blocks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_blocks", "ratio", "chosen"),
    [
        (0, 0.0, ""),
        (0, 1.0, ""),
        (4, 0.0, "...."),
        (4, 1.0, "xxxx"),
        (4, 0.5, ".x.x"),
        (4, 0.25, "...x"),
        (4, 0.1, "...."),
        (5, 0.4, "..x.x"),
        (3, 0.9, "xxx"),
    ],
)
def test_blocks_that_are_recomputed_are_spread_evenly(num_blocks: int, ratio: float, chosen: str) -> None:
    assert "".join("x" if each else "." for each in blocks_recomputed(num_blocks, ratio)) == chosen


@given(st.integers(0, 60), st.floats(0, 1))
def test_as_many_blocks_are_recomputed_as_the_ratio_says_and_gaps_differ_by_one(num_blocks: int, ratio: float) -> None:
    chosen = blocks_recomputed(num_blocks, ratio)
    assert len(chosen) == num_blocks
    assert sum(chosen) == round(num_blocks * ratio)
    at = [-1, *(index for index, is_chosen in enumerate(chosen) if is_chosen)]
    gaps = {after - before for before, after in itertools.pairwise(at)}
    assert not gaps or max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
    ("num_blocks", "unit", "units"),
    [
        (4, 1, [[0], [1], [2], [3]]),
        (4, 2, [[0, 1], [2, 3]]),
        (5, 2, [[0, 1], [2, 3], [4]]),
        (3, 9, [[0, 1, 2]]),
        (3, "whole", []),
        (0, 1, []),
        (0, "whole", []),
    ],
)
def test_units_are_blocks_in_a_row(num_blocks: int, unit: Any, units: list[list[int]]) -> None:
    assert [list(each) for each in units_of_blocks(num_blocks, unit)] == units
